"""``python -m tests.mutants``: breaks the core one line at a time and checks that a test notices.

A mutant is a module of the core with one small change: a boundary moved, a condition negated, a
call removed, a term of an SQL statement dropped. Each one runs against the core's unit tests and
the local contract tests that reach the changed line, nearest first, until one fails. A mutant that
all of them pass has survived: either a test is missing, or the change makes no difference. The
latter are marked in ``equivalent.txt``, each with its reason.

Which tool, and why: mutmut 3 makes most of the changes (its operators are imported), but does not
run them. Run by itself it changes only the bodies of undecorated functions, so it skips properties,
class fields and constants, and with them every SQL statement of the engine. It also has no sample
by seed, no score per module, and no marks outside of the source. cosmic-ray was tried as well: of
its 382 mutants of ``lease.py`` more than half replace the ``|`` of annotations or the ``*`` of
signatures, it removes no statements, and it edits the source files and starts a new pytest for
every mutant.

The rules of a run:

1. The tests run once unchanged, under coverage, to learn which test reaches which line.
2. Mutants are drawn by seed: the same seed draws the same mutants from the same source.
3. A mutant lives in memory only. A forked process imports the changed source in place of the
   module, so nothing in the tree changes and several can run side by side.
4. Text for people is not changed: log calls, texts of errors, docstrings, strings with spaces.
"""
