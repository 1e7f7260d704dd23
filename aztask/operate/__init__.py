"""What people and programs ask of a running aztask, and do to it: each query and each action once.

The commands, ``aztask top`` and others parse, confirm and draw; everything else is here.

Rules
1. A query is a function that returns values, and prints nothing. What it had to skip is in its
   answer.
2. An action is a function that returns a `aztask.operate.action.Action`: what it would act on,
   counted, and nothing done yet. `Action.act` does it, and leaves one event that says who did what,
   to how many, and how it ended.
"""
