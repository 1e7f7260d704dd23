"""The services of a simulated world: in memory, in one thread, on the world's time.

The adapters above them are the real ones. Only what would send bytes is modelled: the requests to
the messages of a Storage queue, the SDK's clients of tables and blobs, the SDK's links of Service
Bus. Retries, receipts, locks, doubts after lost answers and the translation of errors are the code
that users run. The same contract suites hold the models against Azurite, the emulator and the
engine (``tests/contract``, the subjects ``simulated-...``).

A world is built like this::

    time = Time()                                 # stepped.Time
    wire = Wire(time, fate)                       # fate: the scheduler's; default: no faults

    queues = StorageQueues(time.clock())          # the services, one of each for the whole world;
    tables = Tables(time.clock())                 # its clock may differ: time.clock(lambda: 3600.0)
    blobs = Blobs(time.clock())
    bus = ServiceBus(time.clock())

    line = wire.line("worker-1", clock)           # one for each program: its name and its clock
    broker = storage_queue_broker(queues, line)   # a real StorageQueueBroker
    broker = service_bus_broker(bus, line)        # a real ServiceBusBroker
    results = tables_results(tables, blobs, line, owner=owner)  # a real TablesResults
    app = App("shop", broker=broker, results=results, payloads=URL)
    keep_payloads(app, blobs, line)               # large arguments and values, if they are wanted

    database = Database(":memory:")               # `local`: the engine itself, broker and store
    broker, results = local_pair(database, clock) # commit together; no wire between them

Create queues and tables at the beginning, over a line without faults: `broker.declare`,
`results.create`. A `Fate` may be exchanged at any time (`Wire.fate`): a last, quiet period has
`Calm`.

Rules
1. Every request to a service goes through `Line.request`, and nothing else does I/O. Before it is
   sent, the port `Fate` decides what becomes of it: one `Outcome` for one `Request`.
2. Nothing here moves the time but `Line`, through the `sleep` of the program's clock: on the way
   there, and on the way back. Give a clock whose `sleep` switches to the scheduler, and other
   programs act while it sleeps; with `Time.clock()` the time passes for all of them. `Fate.of` may
   switch too, before it answers: then others act between the decision to send and the request.
   One program is one greenlet: two steps of one program must not be interleaved, because the
   adapters' locks are those of threads.
   If `sleep` raises or does not return, the program died or froze while it waited. Its request
   arrives all the same, at its time; only a fault loses it.
3. A request that takes longer than its caller's patience is carried out all the same, when it
   arrives: `Wire.arrive` does that. Each later request calls it first, so what it does is done at
   its own time. A scheduler that sleeps until something happens looks at `Wire.next_at` too.
4. Programs without a clock of their own (a send, a `TimeBudget`) use the ambient clock
   (`aztask.support.clock.replaced`): the scheduler replaces it whenever another program goes on.
5. All of it is in the order of the calls, and draws no random numbers; the adapters draw from
   `aztask.support.chance`. One seed is one course (`test_services.py` compares two).
6. What lies in a service can be read and damaged: `StorageQueues.queues` (a message's ``text``),
   `Tables.change` (any property, as an outsider with a key), `Blobs.containers`, and
   `ServiceBus.queues` (a message's ``content``: what `read_message` makes of any bytes). The two
   sides of a service never share a mutable value.
7. `StorageQueues.until_change` and `ServiceBus.until_change` say how long nothing happens in a
   service by itself.
8. When a program dies, close its broker and its result store: that sends no request, and frees
   what they hold in this process. Leases lapse by themselves. Connections to Service Bus end, as
   the kernel would end them, and their sessions are released; `cut` does only that, for a program
   that goes on. `ServiceBus.restart` voids all locks.

Not modelled: a program that goes on while a request is on its way, but for the renewals of Storage
queues, which are posted (`Line.post`). All other requests are waited for, one after the other, also
those that the adapters make in parallel. Mailboxes of Service Bus (topics) are not modelled, those
of Storage queues are.

See `wire` for what a fate may decide.
"""

from __future__ import annotations

from .blobs import Blobs
from .bus import ServiceBus
from .busbroker import service_bus_broker
from .local import local_pair
from .payloads import URL, blob_payloads, keep_payloads
from .storagebroker import storage_queue_broker
from .storagequeues import StorageQueues
from .tableresults import rows_store, table_requests, tables_results
from .tables import Tables
from .wire import (
    FINE,
    Calm,
    Fate,
    Fault,
    Line,
    Outcome,
    Refused,
    Request,
    Service,
    Unanswered,
    Unconnected,
    Wire,
)

__all__ = [
    "Blobs",
    "FINE",
    "URL",
    "Fate",
    "Fault",
    "Calm",
    "Line",
    "Outcome",
    "Refused",
    "Request",
    "Service",
    "ServiceBus",
    "StorageQueues",
    "Tables",
    "Unanswered",
    "Unconnected",
    "Wire",
    "blob_payloads",
    "keep_payloads",
    "local_pair",
    "rows_store",
    "service_bus_broker",
    "storage_queue_broker",
    "table_requests",
    "tables_results",
]
