"""The README links to what exists, begins with what `.ci/run` runs, and quotes real figures."""

import configparser
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"
NO_SOURCES = {".git", ".tox", ".venv", "node_modules", "build", "dist", "aztask.egg-info", "_build"}
NO_SOURCES |= {"__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis", ".aztask"}
BENCHMARKS = ROOT / "docs" / "benchmarks"


@pytest.fixture
def text():
    return README.read_text(encoding="utf-8")


@pytest.fixture
def metadata():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    return settings["metadata"]


def blocks(text, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", text)


def test_it_begins_with_the_two_commands_of_the_whole_check(text):
    commands = blocks(text, "sh")[0].splitlines()
    assert commands == ["pip install . && aztask demo", "pip install tox && tox"]
    if CI.exists():  # it is no part of a source distribution
        assert all(command in CI.read_text(encoding="utf-8") for command in commands)


def test_its_links_lead_to_files_of_the_project(text):
    links = re.findall(r"(?m)^\[`(.+)`\]: (\S+)$", text)
    assert len(links) > 8
    for name, target in links:
        assert target == name and (ROOT / target).is_file()
        assert text.count(f"[`{name}`]") >= 2


def test_every_file_that_it_names_exists(text):
    names = re.findall(r"`((?:docs/)?[\w./-]+\.(?:md|txt))`", text)
    assert len(names) > 8
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_the_task_has_eight_lines(text):
    name, *lines = blocks(text, "python")[0].splitlines()
    assert name == "# shop.py" and len(lines) == 8


def test_the_demo_is_quoted_in_five_lines_that_it_prints(text):
    (shown,) = blocks(text, "text")
    fields = [line.partition(":")[0] for line in shown.splitlines()]
    assert fields == ["tasks", "succeeded", "retried", "failed", "seconds"]
    source = (ROOT / "aztask" / "operate" / "cli" / "demo.py").read_text(encoding="utf-8")
    assert all(f'"{field}' in source for field in fields)


def measured(name, row):
    """The median of a row of a benchmark's output."""
    text = (BENCHMARKS / name).read_text(encoding="utf-8")
    (value,) = re.findall(rf"(?m)^  {re.escape(row)} +([\d.,]+) \(", text)
    return float(value.replace(",", ""))


CELERY = ("celery solo", "celery threads")
"""Celery's pools in the benchmark of Storage queues."""


def cells_of(text, row):
    """The cells of a row of a table: aztask's, Celery's, dramatiq's."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def numbers(cell):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", cell)]


@pytest.mark.parametrize(
    ("row", "figures", "best"),
    [
        ("single sends/s", "{}: single sends/s", max),
        ("idle queue", "{}: idle latency p50, ms", min),
    ],
)
def test_the_figures_beside_its_peers_were_measured(text, row, figures, best):
    def figure(system):
        return round(measured("storagequeue.txt", figures.format(system)))

    ours, celery, dramatiq = (numbers(cell) for cell in cells_of(text, row))
    assert ours == [figure("aztask")] and dramatiq == [figure("dramatiq")]
    assert celery == [best(map(figure, CELERY))]


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        ("20 times `kill -9`", "{}: tasks lost in 20 kills"),
        ("tasks/s, no-ops, one worker", "{}: tasks/s"),
    ],
)
def test_both_of_celerys_pools_are_shown(text, row, figures):
    cells = [numbers(cell.replace("8 threads", "")) for cell in cells_of(text, row)]
    expected = [["aztask"], CELERY, ["dramatiq"]]
    assert cells == [
        [round(measured("storagequeue.txt", figures.format(system))) for system in systems]
        for systems in expected
    ]


WAYS = {"prefork": "prefork -c 8", "one solo": "one -P solo", "eight solo": "eight -P solo"}


def celery_figure(service, transport, way):
    """The median rate of Celery on a transport, in one of the ways to run it."""
    name = f"{service}, {transport}, {WAYS[way]}, late acknowledgement"
    return measured("celery-transports.txt", name)


def test_what_eight_processes_of_celery_add_was_measured(text):
    (quoted,) = re.findall(r"on Storage queues they run ([\d.]+) times the tasks of one", text)
    eight, one = (
        celery_figure("Storage queues", "Kombu's transport", way)
        for way in ("eight solo", "one solo")
    )
    assert float(quoted) == round(eight / one, 1)


@pytest.mark.parametrize(
    ("row", "services"),
    [
        ("Storage queues, tasks/s", ["Storage queues"] * 2),
        ("Service Bus, tasks/s, no network delay", ["Service Bus, 0 ms"] * 2),
        ("Service Bus, tasks/s, 5 ms of network delay", ["Service Bus, 5 ms"] * 2),
        ("one machine, a local file or Redis, tasks/s", ["a local file", "Redis"]),
    ],
)
def test_the_rates_of_celery_are_those_of_each_transport_at_its_best(text, row, services):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    cells = re.findall(r"([\d,]+) \(([a-z ]+)\)", line)
    for service, transport, (number, way) in zip(
        services, ("aztask's transport", "Kombu's transport"), cells, strict=True
    ):
        rates = {each: celery_figure(service, transport, each) for each in WAYS}
        assert rates[way] == max(rates.values())
        assert int(number.replace(",", "")) == round(rates[way])


@pytest.mark.parametrize("service", ["Storage queues", "Service Bus"])
def test_what_celery_loses_on_each_transport_was_counted(text, service):
    (line,) = re.findall(rf"(?m)^\| lost in 20 times `kill -9`, {service} \| (.+) \|$", text)
    rows = (BENCHMARKS / "celery-transports.txt").read_text(encoding="utf-8")
    counted = [
        re.findall(rf"(?m)^  {service}, {transport}, .+: lost in 20 kills +(\d+)$", rows)
        for transport in ("aztask's transport", "Kombu's transport")
    ]
    assert counted == [[number] for number in line.split(" | ")]


def test_the_figures_on_service_bus_were_measured(text):
    quoted = [
        float(number.replace(",", ""))
        for line in text.splitlines()
        if line.startswith(("| tasks/s, no network", "| tasks/s, 5 ms"))
        for number in re.findall(r"([\d,]+) \(", line)
    ]
    celery = ("Celery, prefork -c 8", "Celery, one -P solo", "Celery, eight -P solo")
    rows = (
        "0 ms: aztask, threads, /s",
        "0 ms: aztask, processes, /s",
        *(f"0 ms: {way}, /s" for way in celery),
        "5 ms: aztask, threads, /s",
        *(f"5 ms: {way}, /s" for way in celery),
    )
    assert quoted == [round(measured("servicebus.txt", row)) for row in rows]


def test_the_index_shows_where_the_project_is(metadata):
    links = dict(line.split(" = ") for line in metadata["project_urls"].strip().splitlines())
    assert list(links) == ["Documentation", "Changelog", "Source", "Issues", "Security"]
    for link in links.values():
        assert link.startswith(links["Source"])
        path = link.partition("/blob/main/")[2]
        assert not path or (ROOT / path).is_file()


def test_no_other_file_names_the_repository(metadata):
    (address,) = re.findall(r"(?m)^Source = https://(\S+)$", metadata["project_urls"])
    named = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [each for each in folders if each not in NO_SOURCES]
        for path in (Path(folder, file) for file in files):
            if path.suffix not in {".pyc", ".png"} and address.encode() in path.read_bytes():
                named.append(path.relative_to(ROOT).as_posix())
    assert named == ["setup.cfg"], "make the link relative: setup.cfg is the one place"
