"""Makes the occurrences of schedules: tasks that are sent at certain times, without a leader.

::

    look       read all schedules; workers claim those that their code declares
    due        the head's watermark moves, and the occurrence is made: one transaction
    send       the task is sent under the occurrence's id; then the occurrence is closed
    repair     any worker sends what stayed open, under the same id

Rules
1. An occurrence and the watermark that passes it are one transaction, compare-and-set on the head.
   So of any number of workers one makes it, and an occurrence whose row was pruned never returns.
2. The task's id is made of the schedule's name and the occurrence's time. A second send of it is
   dropped: by the service, by the sender that finds the id, or by the worker that finds the run.
3. The worker that made the last occurrence makes the next one. The others wait a second or more
   for it, each for another time: so workers hardly ever write at once, and if that worker died, the
   first of them takes its place.
4. Time is the store's. Everything is decided by `rules.decide`, from the head and that time alone.
5. A definition is stored with its message signed, and verified before each send.

Modules: `triggers` (when), `rules` (what happens to late and overlapping occurrences, and which are
made now), `stored` (heads and occurrences as bytes), `view` (what was read, and claims), `engine`
(changes in the store, and sends), `runner` (what a worker does all the time), `schedules` (the API
of an app).
"""
