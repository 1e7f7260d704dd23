"""Every reader that remembers a place has a test of what it does when that place changes.

Between two looks of such a reader another part may rewrite or remove what it points to: a
compaction, a clean-up, a purge, a replay. The readers are found in the source: modules that hold a
`Position` or `Positions`, or an offset of a Spark stream, or a list of event files that they act on
later. Brokers and the emulator are what positions belong to; the contract tests have those.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aztask"
OWNERS = ("emulator/", "queues/")
USERS = ("queues/lease/",)
"""What is in the folder of an owner, and only uses one."""

SIGNS = {"Position", "Positions", "latestOffset", "waiting_files", "receive_deferred"}

READERS = {
    "spark/events/stream.py": "spark/test_event_streams.py::"
    "test_what_was_compacted_while_the_query_did_not_run_is_read",
    "spark/tables/follow.py": "spark/test_follow.py::"
    "test_files_that_are_compacted_while_they_are_read_are_read_from_there",
    "worker/upkeep/uploader.py": "integration/test_event_upload.py::"
    "test_a_compaction_between_two_looks_takes_nothing_that_waits",
    "worker/upkeep/housekeeping.py": "unit/worker/upkeep/test_deadwatch.py::"
    "test_a_purge_between_two_looks_hides_no_later_one",
    "worker/pipeline/pointers.py": "integration/test_strategies.py::"
    "test_a_pointer_whose_message_is_gone_ends",
    "spark/deadletters.py": "spark/test_deadletters.py::"
    "test_a_snapshot_whose_letters_are_removed_replayed_and_added_to_meanwhile",
    "operate/jobrunner.py": "unit/operate/test_jobs.py::"
    "test_what_is_purged_before_a_process_looks_again_counts_as_done",
    "operate/move/messages.py": "unit/operate/test_move.py::"
    "test_a_scheduled_message_that_becomes_due_before_it_is_cancelled_is_one_run",
    "operate/deadletters/view.py": "spark/test_deadletters.py::"
    "test_a_selection_is_replayed_from_a_snapshot",
    "operate/deadletters/letters.py": "spark/test_deadletters.py::"
    "test_a_selection_is_replayed_from_a_snapshot",
    "operate/deadletters/sweep.py": "unit/deadletters/test_sweep.py::"
    "test_what_somebody_else_settled_is_counted_as_lost",
    "queues/lease/held.py": "contract/test_contract_looking.py::"
    "test_a_remembered_position_of_a_deferred_message_that_is_gone_finds_nothing",
}
"""{module: the test of what changes between two of its looks}."""

NO_READERS = {
    "app/app.py": "passes a position on to `queues/lease/held.py`",
    "app/sending.py": "passes a position on to `queues/lease/held.py`",
    "app/tasks.py": "names the message in an error",
    "operate/deadletters/actions.py": "passes a selection on to `operate/deadletters/view.py`",
    "operate/verify.py": "receives once, by the position, what it has just deferred itself",
    "queues/lease/asyncheld.py": "passes on what `queues/lease/held.py` returns",
    "stores/records/base.py": "a column: which message has started a run",
    "stores/records/damage.py": "reads that column",
    "stores/records/local/rows.py": "writes that column",
    "stores/records/tables/rows.py": "writes that column",
    "worker/pipeline/uniquekeys.py": "a key of what this process holds under a lease",
}
"""Modules that use the word and look at nothing twice, with the reason."""


def signs_in(source: str) -> set[str]:
    """The names of `SIGNS` that a module uses other than to import them, or defines."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found & SIGNS


def readers() -> dict[str, set[str]]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        signs = signs_in(path.read_text(encoding="utf-8"))
        if signs and (not name.startswith(OWNERS) or name.startswith(USERS)):
            found[name] = signs
    return found


def test_every_reader_that_remembers_a_place_has_a_test() -> None:
    found = readers().keys()
    assert sorted(found - READERS.keys() - NO_READERS.keys()) == []
    assert sorted((READERS.keys() | NO_READERS.keys()) - found) == [], "no longer used"


@pytest.mark.parametrize("module", READERS)
def test_its_test_exists(module: str) -> None:
    file, _, name = READERS[module].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def look(after: Position | None): ...", {"Position"}),
        ("from aztask.queues.base import Position", set()),
        ("receiver.receive_deferred([1])", {"receive_deferred"}),
        ("class Stream:\n    def latestOffset(self): ...", {"latestOffset"}),
    ],
)
def test_what_is_found(source: str, found: set[str]) -> None:
    assert signs_in(source) == found
