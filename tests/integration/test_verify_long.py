"""The long proofs of ``aztask azure verify`` in seconds, and what throughput says under load."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from azurite import Azurite
from azurite import running as azurite_running
from click.testing import CliRunner

from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.operate import verifyload, verifylong
from aztask.operate.cli.azure import verify_
from aztask.operate.verify import verify
from aztask.operate.verifybench import PREFIX, Bench
from aztask.operate.verifylong import AFTER, WEEK, LongProof, verify_long
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.support.clock import Clock, boot_seconds, replaced
from aztask.testing import Faults, RunningEmulator, emulator

OTHERS = {name: LongProof("1", lambda bench: "done") for name in ("throttling", "idle")}


class Moved:
    """The time of a service and of this machine, some seconds ahead of the system's."""

    def __init__(self) -> None:
        self.by = 0.0
        self.clock = Clock(
            lambda: boot_seconds() + self.by, lambda: time.time() + self.by, lambda seconds: None
        )


@pytest.fixture
def moved() -> Iterator[Moved]:
    made = Moved()
    with replaced(Clock(boot_seconds, made.clock.wall, time.sleep)):
        yield made


@pytest.fixture
def slow_bus(moved: Moved, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningEmulator]:
    """An emulator whose clock the test moves."""
    with emulator(clock=moved.clock) as running:
        monkeypatch.setenv(ADMIN_VARIABLE, running.admin_connection_string)
        yield running


def only_the_week(monkeypatch: pytest.MonkeyPatch) -> None:
    week = verifylong.LONG["seven-days"]
    monkeypatch.setattr(verifylong, "LONG", {"seven-days": week})


def states(app: App, file: Path) -> dict[str, tuple[str, str]]:
    return {each.check: (each.state, each.text) for each in verify_long(app, file)}


def mine(app: App) -> list[str]:
    return [name for name in app.broker.queues() if name.startswith(PREFIX)]


def test_a_week_on_service_bus_is_waited_for_by_nobody(
    slow_bus: RunningEmulator, moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_week(monkeypatch)
    file = tmp_path / "long.json"
    with closing(App("shop", broker=slow_bus.connection_string)) as app:
        first = states(app, file)
        assert first["seven-days"][0] == "waiting"
        assert first["seven-days"][1].startswith("run the same command again after 2")
        queue = mine(app)
        assert len(queue) == 1
        moved.by = WEEK / 2
        assert states(app, file)["seven-days"] == first["seven-days"], "the time stays the same"
    moved.by = WEEK + AFTER + 1
    with closing(App("shop", broker=slow_bus.connection_string)) as app:
        assert mine(app) == queue
        state, text = states(app, file)["seven-days"]
        assert (state, mine(app)) == ("passed", []), text
        assert "a message of the same id is stored again" in text
        app.broker.close()
        assert states(app, file)["seven-days"] == (state, text), "it has ended: nothing is asked"


def test_a_week_on_storage_queues(
    moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_week(monkeypatch)
    file = tmp_path / "long.json"
    with (
        azurite_running(tmp_path / "azurite") as azurite,
        closing(App("shop", broker=azurite.connection_string)) as app,
    ):
        assert states(app, file)["seven-days"][0] == "waiting"
        moved.by = WEEK + AFTER + 1
        azurite.advance(moved.by)
        state, text = states(app, file)["seven-days"]
        assert (state, mine(app)) == ("passed", []), text


def test_a_message_that_is_gone_after_a_week_is_refuted(
    slow_bus: RunningEmulator, moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_week(monkeypatch)
    monkeypatch.setattr("aztask.operate.verifybench.LATE", 1.0)
    file = tmp_path / "long.json"
    with closing(App("shop", broker=slow_bus.connection_string)) as app:
        states(app, file)
        moved.by = WEEK + AFTER + 1
        (queue,) = mine(app)
        receiver = app.broker.receiver(queue, lease=6.0, delete=True)
        assert len(receiver.receive(1, 5.0)) == 1
        state, text = states(app, file)["seven-days"]
    assert state == "failed" and "no message within" in text
    assert json.loads(file.read_text())["ended"]["seven-days"]["state"] == "failed"


def test_an_outage_at_the_end_of_the_week_loses_nothing(
    slow_bus: RunningEmulator, moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(bench: Bench) -> str:
        raise BrokerUnavailable("no route")

    only_the_week(monkeypatch)
    file = tmp_path / "long.json"
    with closing(App("shop", broker=slow_bus.connection_string)) as app:
        states(app, file)
        moved.by = WEEK + AFTER + 1
        whole = verifylong.LONG["seven-days"]
        with monkeypatch.context() as patched:
            patched.setattr(verifylong, "LONG", {"seven-days": whole._replace(check=away)})
            assert states(app, file)["seven-days"] == ("failed", "no route")
        assert len(mine(app)) == 1
        assert states(app, file)["seven-days"][0] == "passed"


def test_a_call_that_was_killed_while_it_prepared_begins_anew(
    slow_bus: RunningEmulator, moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As SIGKILL: nothing is cleaned up."""

    def killed(*given: object, **options: object) -> None:
        raise Killed

    only_the_week(monkeypatch)
    file = tmp_path / "long.json"
    with closing(App("shop", broker=slow_bus.connection_string)) as app:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(verifylong.RunState, "note_begun", killed)
            states(app, file)
        assert len(mine(app)) == 1, "the queue is there, and its messages"
        assert states(app, file)["seven-days"][0] == "waiting"
        moved.by = WEEK + AFTER + 1
        assert states(app, file)["seven-days"][0] == "passed", "each message is there once"


def test_idle_links_are_closed_by_the_service_and_traffic_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifylong, "IDLE", 6.0)
    monkeypatch.setattr(verifylong, "LONG", {"idle": verifylong.LONG["idle"]})
    with emulator(faults=Faults(idle=2.0)) as bus:
        monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        with closing(App("shop", broker=bus.connection_string)) as app:
            state, text = states(app, tmp_path / "long.json")["idle"]
    assert state == "passed", text
    assert text.startswith("after 0.1 min without traffic a send took")
    assert text.endswith("the service had closed 1 of the two links"), "a send opens its own again"


def test_throttling_is_met_and_nothing_that_was_refused_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifylong, "LONG", {"throttling": verifylong.LONG["throttling"]})
    monkeypatch.setattr(verifyload, "sleep", lambda seconds: None)
    with emulator(faults=Faults(busy=0.02)) as bus:
        monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        with closing(App("shop", broker=bus.connection_string)) as app:
            state, text = states(app, tmp_path / "long.json")["throttling"]
    assert state == "passed", text
    assert text.startswith("refused after ")


def test_a_service_that_refuses_none_is_not_throttled(
    bus: RunningEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    monkeypatch.setattr(verifylong, "LONG", {"throttling": verifylong.LONG["throttling"]})
    monkeypatch.setattr(verifyload, "MOST", 640)
    with closing(App("shop", broker=bus.connection_string)) as app:
        state, text = states(app, tmp_path / "long.json")["throttling"]
    assert state == "skipped" and text.startswith("640 sends at ")


def test_throughput_counts_refusals_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifyload, "sleep", lambda seconds: None)
    with emulator(faults=Faults(busy=0.3)) as bus:
        monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        with closing(App("shop", broker=bus.connection_string)) as app:
            (proof,) = verify(app, ["throughput"])
    assert proof.state == "passed", proof.text
    assert "sends were refused as busy and made again" in proof.text


@pytest.mark.parametrize(("fault", "text"), [("lost", "1 were lost"), ("twice", "1 came twice")])
def test_a_service_that_loses_or_doubles_a_message_is_refuted(
    fault: str, text: str, bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    monkeypatch.setattr(verifyload, "LATE", 2.0)
    monkeypatch.setattr(verifyload, "WAIT", 1.0)
    with closing(App("shop", broker=bus.connection_string)) as app:
        send = app.broker.send

        def faulty(queue: str, envelopes: list[object]) -> None:
            first = [each for each in envelopes if each.message_id == "7"]  # type: ignore[attr-defined]
            others = [each for each in envelopes if each not in first]
            send(queue, [*others, *first, *first] if fault == "twice" else others)  # type: ignore[arg-type]

        monkeypatch.setattr(app.broker, "send", faulty)
        (proof,) = verify(app, ["throughput"])
    assert proof.state == "failed"
    assert text in proof.text


def test_the_command_keeps_a_file_and_goes_on_with_it(
    slow_bus: RunningEmulator, moved: Moved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    week = verifylong.LONG["seven-days"]
    monkeypatch.setattr(verifylong, "LONG", {"seven-days": week, **OTHERS})
    (tmp_path / "shop.py").write_text("from aztask import App\napp = App('shop')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("AZTASK_APP", "shop:app")
    monkeypatch.setenv("AZTASK_BROKER", slow_bus.connection_string)
    done = CliRunner().invoke(verify_, ["--long", "long.json", "--report", "report.json"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("waiting  seven-days (rule 25): run the same command again after")
    assert lines[-1] == "1 waiting, 2 passed"
    text = (tmp_path / "long.json").read_text() + (tmp_path / "report.json").read_text()
    assert "127.0.0.1" not in text and slow_bus.connection_string not in text
    done = CliRunner().invoke(verify_, ["--clean"])
    assert done.output.startswith(f"deleted queue {PREFIX}")


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", "{}", '{"service": "x", "run": 1, "begun": {}, "ended": {"a": {}}}']
)
def test_a_file_of_something_else_is_refused_and_kept(
    text: str, bus: RunningEmulator, azurite: Azurite, tmp_path: Path
) -> None:
    file = tmp_path / "notes.json"
    file.write_text(text)
    with (
        closing(App("shop", broker=bus.connection_string)) as app,
        pytest.raises(ConfigurationError, match="give another file"),
    ):
        list(verify_long(app, file))
    assert file.read_text() == text


def test_a_run_does_not_change_the_service(
    bus: RunningEmulator, azurite: Azurite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifylong, "LONG", OTHERS)
    with closing(App("shop", broker=bus.connection_string)) as app:
        states(app, tmp_path / "long.json")
    with (
        closing(App("shop", broker=azurite.connection_string)) as app,
        pytest.raises(ConfigurationError, match="give another file"),
    ):
        states(app, tmp_path / "long.json")
