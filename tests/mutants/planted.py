"""Two mutants whose fate is known; they are tried in every run, before all others.

A run that does not notice the first is blind: its tests run the unchanged source. A run that
notices the second, which changes nothing, fails for another reason than its mutants.
"""

from __future__ import annotations

from .making import Mutant, mutants_of
from .modules import Source, find

MODULE = "aztask.retry"
TESTS = "tests/unit/test_retry.py"
KEY = (
    "retry",
    "RetryPolicy._retry",
    "if message.resubmit_count >= self.max_retries:",
    "if message.resubmit_count > self.max_retries:",
    1,
)


def noticed() -> Mutant:
    """One that tests of its module notice. Raises SystemExit where the source has it no more."""
    (source,) = find([MODULE])
    for mutant in mutants_of(source):
        if mutant.key == KEY:
            return mutant
    raise SystemExit(f"tests/mutants/planted.py: {MODULE} has no such mutant any more: {KEY}")


def unchanged() -> Mutant:
    """The same place, with the text that it has."""
    found = noticed()
    source: Source = found.source
    text = source.text[found.start : found.end]
    return Mutant(
        source, found.function, found.before, found.before, found.start, found.end, text,
        found.first, found.last, found.at_import,
    )  # fmt: skip
