"""Runs graphs of tasks: the graph is in the result store, and messages carry ids.

::

    start      announce, write plan and messages, write the root (it commits), send the entries
    a task     outcome -> its bit, or the nodes that follow it -> settlement
    a join     row full -> values of the row -> bit above -> all rows full: the decision
    the root   its decision ends the workflow

Rules
1. A member's end sets its own bit; nothing is counted. A bit is set by compare-and-set of its row,
   or appended to it and then read, see `aztask.workflows.documents`. So a repeated end changes
   nothing, and the worker that completes a join sends what follows, under deterministic ids.
2. The outcome is recorded before the bit, the bit set before the follow-up is sent, and that sent
   before the message is settled. A worker that dies in between leaves the message: its redelivery
   finds the outcome and repeats the other steps. Where broker and store share a file, all of this
   is one transaction.
3. A bit has the version (node, generation) of the end that set it, and only a later version changes
   it: a late redelivery of generation 0 never undoes a replay.
4. A join that has succeeded is frozen: a replay changes a member, not what the body gets.
5. A stored message is verified like a received one before a worker sends it.
6. Housekeeping of any worker compares unset bits with recorded outcomes, see
   `aztask.workflows.repair`.

Modules: `graphs` (signatures, chains, groups and chords as plain values), `compiler`, `plan` and
`place` (what they compile to), `bits` (rows and decisions as values), `documents` (compare-and-set
with retries), `edits` (changes of documents), `graph` (root, plan and stored messages), `joins`
(ends become bits and follow-ups), `mailing` (sends nodes), `starting`, `inputs` (values by
reference), `repair`, `result`. The first four neither send nor store anything.
"""
