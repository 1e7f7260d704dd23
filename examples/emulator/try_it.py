"""Send, receive, retry and dead-letter against a local Service Bus, in a few seconds."""

from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from aztask.testing import emulator

CONFIG = Path(__file__).parent / "config.json"

with emulator(config=CONFIG) as bus:
    print("connection string:", bus.connection_string)
    client = ServiceBusClient.from_connection_string(bus.connection_string)
    with (
        client,
        client.get_queue_sender("orders") as sender,
        client.get_queue_receiver("orders") as receiver,
        client.get_queue_receiver("orders", sub_queue="deadletter") as dead_letters,
    ):
        sender.send_messages([ServiceBusMessage("good"), ServiceBusMessage("bad")])
        for message in receiver.receive_messages(2, max_wait_time=5):
            if str(message) == "good":
                receiver.complete_message(message)
            else:
                receiver.dead_letter_message(message, reason="not an order")
        for letter in dead_letters.receive_messages(1, max_wait_time=5):
            print("dead letter:", letter, "because:", letter.dead_letter_reason)
            dead_letters.complete_message(letter)
