"""Celery keeps its results in a store of aztask: real workers, a local file and Azure Tables."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import azurite
import pytest
from test_embedded import Place

from aztask.stores.records.base import Provisioned
from aztask.stores.records.workflows import workflows_of

CHORDS = """
from celery.result import GroupResult
chords = [chord([add.s(n, m) for m in range(8)], total.s()).apply_async() for n in range(3)]
nested = chord([chain(add.s(1, 1), add.s(2)), chord([add.s(3, 3)], total.s())], total.s())
nested = nested.apply_async()
broken = chord([add.s(1, 1), fail.s(7)], total.s().on_error(failed_id.s())).apply_async()
one = add.apply_async((40, 2))
bad = fail.apply_async((1,))
saved = group(add.s(1, 1), add.s(2, 2)).apply_async()
saved.save()
out = [one.get(timeout=50), [each.get(timeout=50) for each in chords], nested.get(timeout=50)]
for result in (bad, broken):
    try:
        result.get(timeout=50)
    except Exception as error:
        out.append([type(error).__name__, str(error), result.state])
out.append(GroupResult.restore(saved.id, app=celery).get(timeout=50))
one.forget()
out.append(one.state)
"""
EXPECTED = [42, [28, 36, 44], 10]


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The connection string of an account with tables and blobs."""
    with azurite.storing(tmp_path_factory.mktemp("account")) as services:
        yield azurite.account_of(*services)


@pytest.fixture(params=["local", "tables"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each store: a file beside the queues, and the Tables of Azurite."""
    if request.param == "local":
        place = Place(tmp_path, f"aztask+local://{tmp_path}/results.db", "results.db")
    else:
        account = request.getfixturevalue("account")
        place = Place(tmp_path, "aztask://", store=account)
        place.environment["AZTASK_RESULTS"] = account
        assert isinstance(place.app.results, Provisioned)
        place.app.results.create()
    yield place
    place.close()


@pytest.mark.parametrize("kinds", ["celery", "aztask", "both"])
def test_results_and_chords(place: Place, kinds: str) -> None:
    if kinds != "aztask":
        place.celery()
    if kinds != "celery":
        place.aztask()
    out = place.send(CHORDS)
    assert out[:3] == EXPECTED, place.log
    assert out[3] == ["ValueError", "no (1,)", "FAILURE"]
    assert out[4][2] == "FAILURE" and "no (7,)" in out[4][1]
    assert out[5:] == [[2, 4], "PENDING"]
    place.until(lambda: any("failed_id" in note for note in place.notes()), "the errback runs")
    assert "chord_unlock" not in place.log
    assert sum(" total " in note for note in place.notes()) == 5, place.notes()


def test_aztask_sees_the_results_of_celery_workers(place: Place) -> None:
    place.celery()
    out = place.send(
        "good, bad = app.send('embedded.add', [1, 2]), app.send('embedded.fail', [7])\n"
        "out = [good.get(timeout=50)]\n"
        "try:\n    bad.get(timeout=50)\nexcept Exception as error:\n"
        "    out += [type(error).__name__, str(error), bad.state]"
    )
    assert out[:2] == [3, "TaskFailed"] and "no (7,)" in out[2] and out[3] == "failed"
    assert [note.split()[0] for note in place.notes()] == ["celery", "celery"]


def test_a_prefork_worker_opens_its_own_store_after_the_fork(place: Place) -> None:
    command = ("-m", "celery", "-A", "embedded_app:celery", "worker", "-c", "2", "-l", "warning")
    place.start(*command, "-P", "prefork", KIND="celery")
    assert (
        place.send("out = chord([add.s(n, 1) for n in range(6)], total.s())().get(timeout=50)")
        == 21
    )


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_worker_waits_for_a_table_that_is_missing(tmp_path: Path, pool: str) -> None:
    with azurite.storing(tmp_path / "account") as services:
        account = azurite.account_of(*services)
        place = Place(tmp_path, "aztask://", store=account)
        place.environment["AZTASK_RESULTS"] = account
        try:
            command = ("-m", "celery", "-A", "embedded_app:celery", "worker", "-c", "1")
            worker = place.start(*command, "-P", pool, "-l", "warning", KIND="celery")
            first = place.send("out = add.delay(40, 2).id")
            place.until(lambda: "results cannot be stored" in place.log, "the worker says so")
            time.sleep(4)  # in which it tries again
            assert worker.poll() is None and "CRITICAL" not in place.log
            assert place.log.count("results cannot be stored") == 1
            assert isinstance(place.app.results, Provisioned)
            place.app.results.create()
            assert place.send(f"out = celery.AsyncResult({first!r}).get(timeout=50)") == 42
            assert sum(" add " in note for note in place.notes()) == 1
        finally:
            place.close()


def test_old_results_are_cleaned_up(place: Place) -> None:
    place.celery()
    place.send(
        "first = add.delay(1, 1); first.get(timeout=50)\n"
        "celery.conf.result_expires = 0.01\n"
        "import time; time.sleep(0.1)\n"
        "backend = celery.backend\n"
        "backend.expires = 0.01; backend.cleanup()\n"
        "backend._cache.clear()\n"
        "out = celery.AsyncResult(first.id).state; assert out == 'PENDING', out"
    )
    store = workflows_of(place.app.results)
    assert store is not None
    names = [listed.workflow for listed in store.ended_workflows(100)]
    assert not [name for name in names if name.startswith("celery-task-meta")]


def test_an_address_without_a_store_is_one_line(tmp_path: Path) -> None:
    place = Place(tmp_path, "aztask://")
    place.environment = {**place.environment, "BACKEND": "aztask://"}
    place.environment.pop("AZTASK_RESULTS", None)
    with pytest.raises(AssertionError, match="names no store: write aztask"):
        place.send("out = add.delay(1, 1).get(timeout=5)")
    place.environment["BACKEND"] = "aztask+table://x"
    with pytest.raises(AssertionError, match="result_backend: "):
        place.send("out = add.delay(1, 1).get(timeout=5)")
    assert "AZTASK_RESULTS" not in os.environ
