"""The app. AZTASK_BROKER and AZTASK_RESULTS name its queues and results."""

import os

from aztask import App, RetryPolicy

STORAGE = ("storagequeue://", "UseDevelopmentStorage", "DefaultEndpointsProtocol")
SESSIONS = not os.environ.get("AZTASK_BROKER", "").startswith(STORAGE)
"""Storage queues have no sessions: `shop.orders` keeps the order of a customer in another way."""

app = App(
    "shop",
    include=["shop.mails", "shop.images", "shop.catalogue", "shop.prices", "shop.orders"],
    retry=RetryPolicy(max_retries=3, delay=0.5, backoff=1.0),
)
if SESSIONS:
    app.queue("orders", sessions=True)
