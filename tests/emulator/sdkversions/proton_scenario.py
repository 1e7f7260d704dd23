"""Transactions with qpid-proton. Arguments: host:port. Prints what happened as JSON.

Each step declares a transaction, receives some messages from ``q``, sends others to ``out``, and
ends the transaction in its own way.
"""

from __future__ import annotations

import json
import sys

from proton import Message
from proton.handlers import MessagingHandler, TransactionHandler
from proton.reactor import Container

# what ends the transaction, messages to receive, messages to send
STEPS = [("abort", 2, 2), ("commit", 2, 3), ("commit", 0, 100), ("close", 1, 1)]


class Scenario(MessagingHandler, TransactionHandler):
    """Runs the steps one after the other."""

    def __init__(self, url):
        super().__init__(prefetch=0, auto_accept=False)
        self.url = url
        self.steps = iter(STEPS)
        self.seen = []
        self.transaction = None

    def on_start(self, event):
        self.container = event.container
        self.connection = self.container.connect(self.url, allowed_mechs="ANONYMOUS")
        self.sender = self.container.create_sender(self.connection, "out")
        self.receiver = self.container.create_receiver(self.connection, "q")
        self.next()

    def next(self):
        step = next(self.steps, None)
        if step is None:
            self.connection.close()
            return
        self.end, self.receiving, self.sending = step
        self.confirmed = 0
        self.container.declare_transaction(self.connection, handler=self)

    def on_transaction_declared(self, event):
        self.transaction = event.transaction
        self.receiver.flow(self.receiving)
        if not self.receiving:
            self.send()

    def on_message(self, event):
        self.transaction.accept(event.delivery)
        self.receiving -= 1
        if not self.receiving:
            self.send()

    def send(self):
        for number in range(self.sending):
            self.transaction.send(self.sender, Message(body=f"{self.end}-{number}"))

    def on_delivery(self, event):
        delivery = event.delivery
        if delivery.link == self.sender and delivery.updated:
            assert delivery.remote_state == 0x34, delivery.remote_state
            delivery.settle()
            self.confirmed += 1
            if self.confirmed == self.sending:
                self.finish()

    def finish(self):
        if self.end == "commit":
            self.transaction.commit()
        elif self.end == "abort":
            self.transaction.abort()
        else:
            self.connection.close()

    def on_transaction_committed(self, event):
        self.seen.append("committed")
        self.next()

    def on_transaction_aborted(self, event):
        self.seen.append("aborted")
        self.next()

    def on_transaction_commit_failed(self, event):
        self.seen.append("failed")
        self.next()


scenario = Scenario(f"amqp://{sys.argv[1]}")
Container(scenario).run()
print(json.dumps(scenario.seen))
