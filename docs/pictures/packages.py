"""The packages of aztask and the direction of their imports."""

from __future__ import annotations

from canvas import Canvas

LAYERS = (
    (
        "edges",
        "agents  celery.backend  celery.migration  dashboard  django  emulator  operate.cli"
        "  operate.top  spark  spark.cli  testing",
        "commands, the operations page, a local Service Bus, Spark, web frameworks",
    ),
    ("telemetry", "telemetry", "traces, metrics and probes, through hooks"),
    ("operate", "operate", "queries and actions; dead letters, explain, doctor"),
    ("worker", "worker", "runs tasks under leases"),
    ("care", "limits", "pauses, limits, circuit breakers"),
    (
        "app",
        "app  celery.embedded",
        "the App, and how commands find it",
    ),
    (
        "tasks",
        "task  limits.declaration  workflows  schedules  uniqueness  steps  handler  context"
        "  result  session  hooks  taskoptions  sending  celery",
        "what users import; sending; Celery and Kombu",
    ),
    ("advice", "stores.events  leaseadvice", "lifecycle events, and leases that follow them"),
    ("stores", "stores  config", "rows, records, large payloads; settings"),
    ("leases", "queues.lease", "states of a lease, and the keeper that renews them"),
    ("brokers", "queues", "one protocol; local, Service Bus, Storage queues"),
    ("engines", "queues.engine  azure  retry", "the embedded queue; Azure requests; retry policy"),
    (
        "values",
        "errors  version  support  address  message  settlement  breaker  typed",
        "values and helpers without I/O of their own",
    ),
)
"""Layers from the top: name, packages and modules, what they are for."""


def draw() -> Canvas:
    """A box for each layer. What is above imports what is below."""
    top, step = 60, 60
    canvas = Canvas(1460, top + step * len(LAYERS) + 20, "The packages and their direction")
    canvas.text(
        20, 34, "Imports point down: a package imports its own layer and those below", "title"
    )
    for number, (name, parts, what) in enumerate(LAYERS):
        y = top + number * step
        style = {"worker": "amber", "values": "green", "tasks": "blue", "app": "blue"}
        canvas.text(20, y + 28, name, "dim")
        canvas.box(
            110, y, 1310, 48, parts.replace("  ", ",  "), what, style=style.get(name, "plain")
        )
    canvas.arrow((1270, top), (1270, top + step * len(LAYERS) - 12))
    return canvas
