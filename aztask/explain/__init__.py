"""What happened to one task, in order: from its rows in the result store and from event files.

Rules
1. Rows know every start that they keep, and every outcome. Deliveries, renewals and lost leases
   come from events only. A start or an outcome that both know is one entry.
2. What is missing is shown as a gap, never guessed: rows drop old starts, workers may run without
   events, and a worker that dies writes no end.
"""
