"""The other end of a pool: a fork server whose processes are the test, and deliveries."""

import os
import socket
from types import SimpleNamespace

from aztask.worker.pool.forking import ForkedStarter
from aztask.worker.pool.packets import Packets
from aztask.worker.pool.pool import PoolProcess


class Server:
    """A fork server whose processes are the test: it keeps their ends of the sockets."""

    def __init__(self):
        self.forked = []
        self.gone = False
        self.ended = []

    def fileno(self):
        """Nothing is ever to be read: a test says what has ended."""
        return 0

    def read(self):
        return self.ended

    def check(self, now):
        pass

    def fork(self, setup, descriptors):
        # the worker closes two of its duplicates: the test needs descriptors of its own
        ends = [Packets(socket.socket(fileno=os.dup(each))) for each in descriptors[:3]]
        inbox, outbox, control = ends
        made = SimpleNamespace(
            setup=setup, inbox=inbox, outbox=outbox, control=control, pid=4242, status=None,
            failed="", kills=0, close=lambda: None, wait=lambda seconds: None,
        )  # fmt: skip
        made.kill = lambda: setattr(made, "kills", made.kills + 1)
        self.forked.append(made)
        return made

    def close(self):
        for each in self.forked:
            for end in (each.inbox, each.outbox, each.control):
                end.close()


class Watching:
    """A mailbox that only notes what is watched."""

    def __init__(self):
        self.watched = {}

    def watch(self, end, readable):
        self.watched[end] = readable

    def unwatch(self, end):
        del self.watched[end]


def started(server, plan):
    """A process of this server, as the pool sees it."""
    return PoolProcess(ForkedStarter(Watching(), server).start(plan), plan)


class Item:
    """A delivery as the pool sees it."""

    def __init__(self, number):
        self.number = number
        self.steps = []

    def sent(self):
        self.steps.append("sent")

    def taken_back(self):
        self.steps.append("taken back")
