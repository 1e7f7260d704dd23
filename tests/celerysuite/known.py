"""The tests of Celery's and Kombu's suites that fail on aztask's transport, by their causes.

A test is named as pytest names it, without folders. The lists are kept true in both directions:
every other test must pass, and every one of these must fail, except those in `TIMING`.
``docs/reference/celery-suite.md`` lists them, too.
"""

from __future__ import annotations

PRIORITIES = {
    f"on_aztask.TestPriority.{name}": "no service that aztask uses has priorities"
    for name in (
        "test_publish_consume",
        "test_publish_requeue_consume",
        "test_simple_queue_publish_consume",
        "test_simple_buffer_publish_consume",
    )
}

KOMBU = {
    **PRIORITIES,
    "on_aztask.TestFailover.test_failover_switches_to_alternate_url": (
        "it tells the two brokers apart by their ports, and files have none"
    ),
}

HIDDEN = (
    "a task with an eta waits in a Storage queue, which hides it until its time; `waits_on_redis`"
    " shows that one that waits in the broker is not listed on Redis either"
)

KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("kombu", "local"): {**KOMBU},
    ("kombu", "servicebus"): {**KOMBU},
    ("kombu", "storagequeue"): {
        **KOMBU,
        "on_aztask.TestEventLoop.test_ack_from_another_thread": (
            "the name of its queue is longer than that of a Storage queue may be"
        ),
    },
    ("celery", "redis"): {},
    ("celery", "local"): {},
    ("celery", "servicebus"): {},
    ("celery", "storagequeue"): {
        "test_inspect.test_Inspect.test_scheduled": HIDDEN,
    },
}
"""By suite and address."""

_ERRBACK = "test_canvas.test_chord.test_mutable_errback_called_by_chord_from_group_fail_multiple_"

TIMING = (
    {
        f"{_ERRBACK}on_body_failure[errback_{style}_style]": (
            "it waits for the first of 42 callbacks and expects the other 41 at that moment, which"
            " a busy machine of two cores does not manage"
        )
        for style in ("old", "new")
    }
    | {
        f"test_canvas.test_chord.test_error_propagates_to_chord_from_chain{tail}": (
            "a result that comes between get()'s looks at its parents and at the result is raised"
            " as a ChordError; with a pause of 2 s there, with `celery redis`, too"
        )
        for tail in ("", "_tail")
    }
    | {
        "test_tasks.test_task_replacement.test_replaced_task_nesting_level_0": (
            "it sets its result to False after it has sent the task, and so loses a True that came"
            " before; with a pause of a second between both, with `celery redis`, too"
        ),
    }
    | {
        "test_mem_leak_in_exception_handling.test_mem_leak_unhandled_exceptions": (
            "it allows a tenth of what its first runs allocate, for all threads of the process, the"
            " worker's included; with `celery redis` it fails, too"
        ),
    }
)
"""These fail on a busy machine, and may pass on an idle one."""
