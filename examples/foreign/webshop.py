"""The other program: it knows nothing of tasks, and puts plain JSON into the queue.

On Service Bus this would be a `ServiceBusMessage`, on a Storage queue `QueueClient.send_message`.
"""

import json

from aztask import App
from aztask.message.envelope import Envelope

shop = App("webshop", broker="local://")
for number, article in enumerate(["tea", "cup", "spoon"], 1):
    body = json.dumps({"OrderNumber": number, "Article": article, "Currency": "EUR"})
    shop.broker.send("orders", [Envelope(body.encode())])
shop.broker.send("orders", [Envelope(b'{"OrderNumber": "four", "Article": "pot"}')])
