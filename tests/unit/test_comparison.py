"""What the pages that compare say: of others with a source, of ours with a test that holds it.

Rules
1. A cell of another tool has a link to where that was read, or a dash.
2. A cell of ours is checked by the test that `OURS` names, word by word: who changes one, looks at
   the other.
3. What aztask has is not said to be missing.
"""

import re
from pathlib import Path

import pytest

from aztask import App
from aztask.errors import ConfigurationError
from aztask.operate.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
STEPS = ROOT / "docs" / "discussions" / "steps.md"

KILLS, BUS = "integration/test_kills.py", "contract/test_contract_"
OURS = {
    "Service Bus, Storage queues or a file; for several machines Azure Tables": (
        "unit/address/test_urls.py::"
    ),
    "yes, with its locks, sessions, schedules and dead letters": (
        f"{BUS}sessions.py::test_renewing_keeps_the_session"
    ),
    "yes": f"{BUS}settling.py::test_a_dead_letter_keeps_its_content_and_says_why",
    "another one takes over when the lease ends": f"{KILLS}::test_killed_at_each_step",
    "the broker's own": f"{BUS}sending.py::test_a_delayed_message_comes_after_its_delay",
    "each worker takes part, no leader": (
        f"{BUS}schedules.py::test_of_many_writers_at_once_one_succeeds"
    ),
    "chain, group, chord; kept in the result store": (
        f"{BUS}workflows.py::test_a_document_is_made_once_and_read_by_all"
    ),
    "`context.step`, `sleep`, `wait_for`": (
        "integration/test_signal_kills.py::test_a_worker_dies_after_every_line_of_a_flow"
    ),
    "for all workers together": (
        "integration/test_limits.py::test_two_workers_keep_the_rate_in_order_and_nothing_is_counted"
    ),
    "a pool of its own": "integration/test_async_tasks.py::",
    "the terminal, a page in the browser, Prometheus and Grafana": (
        "unit/dashboard/test_pages.py::test_the_menu_has_a_page_for_each_entry"
    ),
}
"""{a cell of the column of aztask: the test that holds it}"""


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading: its head, then its rows."""
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


ROWS = table(PAGE, "Side by side")[1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_said_of_others_has_a_source(row: list[str]) -> None:
    assert len(row) == 7
    for cell in row[2:]:
        assert cell == "–" or re.search(r"\]\(https://[\w./#-]+\)", cell), cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_said_of_ours_has_a_test(row: list[str]) -> None:
    file, _, name = OURS[row[1]].partition("::")
    assert f"def {name or 'test_'}" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_each_test_is_of_a_cell() -> None:
    assert set(OURS) == {row[1] for row in ROWS}


def test_the_comparison_of_steps_has_a_source_for_each_tool() -> None:
    text = STEPS.read_text(encoding="utf-8").partition("\n## Beside Temporal")[2]
    intro = text.partition("\n| |")[0]
    rows = table(STEPS, "Beside Temporal, DBOS, Inngest and Durable Functions")
    for name in rows[0][2:]:
        assert f"[{name}](https://" in intro
    assert {len(row) for row in rows} == {6}


@pytest.mark.parametrize("page", [PAGE, STEPS], ids=lambda page: page.stem)
def test_what_aztask_has_is_not_said_to_be_missing(page: Path) -> None:
    text = page.read_text(encoding="utf-8").lower()
    for gone in ("no web interface", "no dashboard", "no renewal", "a workflow is a graph that is"):
        assert gone not in text
    assert "dashboard" in cli.commands or cli.get_command(None, "dashboard")  # type: ignore[arg-type]


def test_it_speaks_to_nothing_but_azure_and_a_file() -> None:
    for address in ("redis://localhost", "amqp://localhost", "nats://localhost"):
        with pytest.raises(ConfigurationError, match="there is no broker of the kind"):
            App("shop", broker=address).broker.queues()  # type: ignore[attr-defined]
