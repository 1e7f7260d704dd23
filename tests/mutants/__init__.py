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

1. The tests that concern the drawn modules run once unchanged, under coverage, to learn which test
   reaches which line. ``near.json`` says which these are (``--map`` writes it, in some minutes),
   and what they reach is kept by the content of the tree.
2. Mutants are drawn by seed: the same seed draws the same mutants from the same source.
3. A mutant is a file in a copy of the tree, one copy for each process, and a run checks that the
   module which the tests have imported is that file's; ``copies.py`` says why. Nothing in the tree
   itself changes.
4. Before all others two planted mutants are tried, one that is known to be noticed and one that
   changes nothing. A run that judges them wrongly ends with exit code 2: its score means nothing.
5. Text for people is not changed: log calls, texts of errors, docstrings, strings with spaces.

``--small`` draws a dozen mutants, for the check of every change: `.ci/run` seeds it with the
commit.
"""
