"""``python -m tests.simulation``: decades of faults in an hour, each repeatable from a seed.

The whole system runs in one thread, on a clock that stands still until it is moved: senders,
workers (the real core, pipeline, lease keeper, pool and chores on the stepped shell), the queues
and the result store. What happens next is drawn from a seed.

    stepped     a worker without threads, processes and sleeps
    course      what a seed draws: the apps, what they are asked to do, and the faults
    programs    the random apps of a course
    flows       tasks with steps, waits and signals, and the assertions about them
    releases    workers of the release before, which know neither
    streams     tasks that emit, readers of what they emit, and the assertions about them
    world       the clock, the actors and the scheduler, which takes one step after the other
    watched     the broker and the result store of each actor: they tell the book what happened
    book        what happened, and the assertions about it, each with a name
    shrinking   the least part of a course that still fails
    faults      known faults of former releases, as patches, and how soon each one is found

Which library, and why: greenlet, so that an actor can stop in the middle of a step, between any two
requests, while the others go on. asyncio-based simulators (aiosim, looptime, mocket) were of no
use: the worker's code is not asynchronous, and nothing of it should be changed for a test.
"""
