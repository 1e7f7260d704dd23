"""What other users of the machine can change is refused at every place that aztask uses."""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aztask
from aztask import App
from aztask.errors import AztaskError, ConfigurationError
from aztask.leaseadvice.stores import LeaseFile
from aztask.operate.exposed import exposed_findings
from aztask.queues.engine import Database
from aztask.queues.engine.filesystem import PARTS
from aztask.spark.events.files import Directory
from aztask.stores.events.event import Event
from aztask.stores.events.sink import FileEventSink
from aztask.stores.payloads.opening import FolderPayloads
from aztask.stores.payloads.store import PayloadKind, new_name
from aztask.support import private
from aztask.support.finding import Finding, Level
from aztask.support.private import exposure, refuse_exposed
from aztask.worker.upkeep.uploader import Uploader

ROOT = Path(aztask.__file__).parent
STRANGER = 4242
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture(autouse=True)
def first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was warned of in this process before."""
    monkeypatch.setattr(private, "_warned", set())


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a stranger the owner. Without root, this process pretends to be another user."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        else:
            monkeypatch.setattr(private, "_user", lambda: STRANGER)

    return give


# -- the mechanism ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400])
def test_a_file_that_only_this_user_writes_is_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    path.touch()
    path.chmod(mode)
    assert exposure(path) is None


def test_what_does_not_exist_is_no_exposure(tmp_path: Path) -> None:
    assert exposure(tmp_path / "f") is None
    (tmp_path / "f").touch()
    assert exposure(tmp_path / "f" / "g") is None


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o666, 0o622])
def test_an_empty_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a file"
    path.touch()
    path.chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode 0{mode:o}\); run: chmod 0600 '/.*a file'"):
        refuse_exposed(path)


def test_only_the_named_group_may_write_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    path.chmod(0o660)
    group = path.stat().st_gid
    assert exposure(path, group) is None
    assert exposure(path, group + 1) is not None
    assert exposure(path) is not None, "without ?group=, not even a group of this process"


def test_a_group_of_this_process_may_write_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes makes it, with fsGroup."""
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(0o2775)
    assert exposure(folder) is None
    monkeypatch.setattr(private, "_groups", lambda: {folder.stat().st_gid + 1})
    with pytest.raises(PermissionError, match=r"by the group \d+ .*a folder inside it"):
        refuse_exposed(folder)
    assert exposure(folder, folder.stat().st_gid) is None


def test_what_belongs_to_a_stranger_is_refused_although_it_is_used(
    tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    path = tmp_path / "f"
    path.write_text("data")
    path.chmod(0o600)
    give_away(path)
    with pytest.raises(PermissionError, match="belongs to user"):
        refuse_exposed(path)


@AS_ROOT
def test_a_member_of_the_named_group_may_own_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    os.chown(path, STRANGER, 1)
    path.chmod(0o660)
    assert exposure(path, 1) is None
    tmp_path.chmod(0o2777)  # here any user can make files of the group
    assert exposure(path, 1) is not None


@AS_ROOT
def test_a_link_of_a_stranger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").touch(0o600)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    assert exposure(link) is None
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="is a link of user 4242"):
        refuse_exposed(link)


def test_what_is_used_already_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For one release: what an earlier one has made, and others may write to."""
    file, folder = tmp_path / "f", tmp_path / "d"
    file.write_text("data")
    file.chmod(0o666)
    (folder / "date=2026-01-01").mkdir(parents=True)
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        for path in (file, folder, file, folder):
            refuse_exposed(path)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(f"run: chmod 0600 {file}. The next release refuses it.")
    assert f"run: chmod 0700 {folder}" in second


@AS_ROOT
def test_what_a_stranger_has_put_into_a_folder_makes_it_no_used_one(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "planted").touch()
    os.chown(folder / "planted", STRANGER, STRANGER)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="every user"):
        refuse_exposed(folder)


def test_a_system_without_users_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(0o666)
    monkeypatch.delattr(os, "geteuid")
    assert exposure(tmp_path / "f") is None


# -- every place -----------------------------------------------------------------------------


def queues(path: Path) -> None:
    App("shop", broker=f"local://{path}").broker.declare("default")


def results(path: Path) -> None:
    app = App("shop", broker="local://:memory:", results=f"local://{path}")
    assert app.results is not None
    app.results.workers()


def payloads_named(path: Path) -> None:
    app = App("shop", broker="local://:memory:", payloads=str(path))
    assert app.payloads is not None
    app.payloads.store.write(new_name(PayloadKind.ARGUMENTS), b"x")


def events(path: Path) -> None:
    FileEventSink(path, "w").close()


def compaction(path: Path) -> None:
    with Directory(str(path)).scratch("date=2026-01-01/a.parquet"):
        pass


def uploads(path: Path) -> None:
    Uploader(path, None).turn()  # type: ignore[arg-type]  # it must not come as far as that


def advice(path: Path) -> None:
    LeaseFile(path).load()


def advice_lock(path: Path) -> None:
    file = LeaseFile(path.with_suffix(""))
    file.publish(file.load().document, file.load())


PLACES: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"queue file {part}": (f"q.db{part}", queues) for part in PARTS},
    "result file": ("r.db", results),
    "folder of payloads": ("payloads/", payloads_named),
    "event directory": ("events/", events),
    "event directory, compacted": ("events/", compaction),
    "event directory, uploaded": ("events/", uploads),
    "lease advice": ("leases.json", advice),
    "lock of the lease advice": ("leases.json.lock", advice_lock),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], None]]:
    """A path in a directory like /tmp, with something empty and private there, and its user."""
    name, use = PLACES[request.param]
    tmp_path.chmod(0o1777)
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir(0o700)
    else:
        path.touch(0o600)
    if use is queues and path.suffix == ".db" and name != "q.db":
        (tmp_path / "q.db").touch(0o600)
    return path, use


@pytest.mark.parametrize("mode", [0o666, 0o606])
def test_what_others_may_write_is_refused_at_every_place(
    place: tuple[Path, Callable[[Path], None]], mode: int
) -> None:
    path, use = place
    path.chmod(mode | (0o111 if path.is_dir() else 0))
    with pytest.raises((AztaskError, PermissionError), match=f"written by every user.*{path.name}"):
        use(path)


def test_what_a_stranger_has_made_is_refused_at_every_place(
    place: tuple[Path, Callable[[Path], None]], give_away: Callable[[Path], None]
) -> None:
    path, use = place
    give_away(path)
    with pytest.raises((AztaskError, PermissionError), match="belongs to user"):
        use(path)


def test_a_log_that_a_stranger_makes_while_the_database_opens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "q.db")
    Database(path).close()
    seen: list[str] = []
    real = private.exposure

    def later(at: Path, group: int | None = None) -> private.Exposure | None:
        seen.append(at.name)
        if at.name == "q.db-wal" and seen.count(at.name) == 2:
            return private.Exposure(at, "belongs to user 4242", "", foreign=True)
        return real(at, group)

    monkeypatch.setattr(private, "exposure", later)
    with pytest.raises(ConfigurationError, match=r"q\.db-wal belongs to user 4242"):
        Database(path)


def test_a_folder_that_is_opened_to_others_later_counts_as_unreachable(tmp_path: Path) -> None:
    store = FolderPayloads(tmp_path / "payloads")
    name = new_name(PayloadKind.ARGUMENTS)
    (tmp_path / "payloads").mkdir(0o777)
    (tmp_path / "payloads").chmod(0o777)
    with pytest.raises(
        AztaskError, match=r"the folder of the payloads, .*, cannot be used: it can"
    ):
        store.write(name, b"x")
    with pytest.raises(AztaskError, match="cannot be used: it can"):
        store.remove([name])


def test_events_are_dropped_where_the_directory_is_opened_to_others_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FileEventSink(tmp_path / "events", "w")
    (tmp_path / "events").mkdir()
    (tmp_path / "events").chmod(0o777)
    sink.emit(Event("enqueued", "id", "t", "q"))
    sink.close()
    assert sink.dropped == 1
    assert "it can be written by every user (mode 0777)" in caplog.text
    assert list((tmp_path / "events").iterdir()) == []


# -- doctor ----------------------------------------------------------------------------------


def app_in(folder: Path) -> App:
    return App(
        "shop",
        broker=f"local://{folder}/q.db",
        results=f"local://{folder}/r.db",
        payloads=str(folder / "payloads"),
        events=str(folder / "events"),
    )


def test_doctor_reads_no_modes_where_a_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_in(tmp_path)
    app.broker.declare("default")
    (tmp_path / "q.db").chmod(0o666)
    monkeypatch.setattr(private, "_user", lambda: None)
    (finding,) = exposed_findings(app)
    assert finding.level is Level.OK
    assert "inherit the permissions of their folder" in finding.text
    assert "chmod" not in str(finding)


def test_doctor_names_owner_and_mode_of_everything(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    app.broker.declare("default")
    assert app.results is not None
    assert app.payloads is not None
    app.payloads.store.write(new_name(PayloadKind.ARGUMENTS), b"x")
    app.open_events("w").emit(Event("enqueued", "id", "t", "q"))
    (tmp_path / "events").mkdir(exist_ok=True)
    (finding,) = exposed_findings(app)
    assert finding.level is Level.OK
    for name in ("q.db", "q.db-wal", "q.db-shm", "r.db", "payloads", "events"):
        assert f"{tmp_path}/{name} (user {os.geteuid()}, mode 0" in finding.text

    for name, mode in (("q.db", 0o644), ("payloads", 0o777), ("events", 0o777), ("r.db", 0o666)):
        (tmp_path / name).chmod(mode)
    found = {each.text.partition(f"{tmp_path}/")[2].split()[0]: each for each in _bad(app)}
    assert {name: each.level for name, each in found.items()} == {
        "q.db": Level.WARNING,
        "r.db": Level.WARNING,
        "payloads": Level.WARNING,
        "events": Level.PROBLEM,  # it is empty, so no release before has used it
    }
    assert "can be read by other users (mode 0644)" in found["q.db"].text
    assert "the next release refuses it" in found["r.db"].text
    assert found["r.db"].advice == f"run: chmod 0600 {tmp_path}/r.db"
    app.close()


def test_doctor_names_a_directory_in_which_others_replace_files(tmp_path: Path) -> None:
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    app.broker.declare("default")
    tmp_path.chmod(0o777)
    assert any("every user can replace the queue file" in each.text for each in _bad(app))
    tmp_path.chmod(0o1777)
    assert _bad(app) == []
    app.close()


def _bad(app: App) -> list[Finding]:
    return [each for each in exposed_findings(app) if each.level is not Level.OK]


# -- the list of places ----------------------------------------------------------------------

MAKERS = {"make_directory", "make_file", "mkdir", "makedirs", "touch", "write_text", "write_bytes"}
MAKERS |= {"mkstemp", "mkdtemp", "symlink_to", "hardlink_to"}

CHECKS = {"refuse_exposed", "require_private", "refuse_strangers"}

CHECKED = "the place is checked with aztask.support.private in this file"
SINK = "the sink that opened the event directory has checked it"
ITSELF = "makes what is private"
OWN = "in a folder that it has just made for itself"
GIVEN = "a file that the user of a command names, with the user's umask"

WRITERS = {
    "emulator/emulator.py:_make": "the key of a development tool, in the folder of its user",
    "emulator/emulator.py:server_context": "the folder of that key",
    "leaseadvice/stores.py:_replace": CHECKED,
    "leaseadvice/stores.py:_turn": CHECKED,
    "operate/bundle.py:write_bundle": GIVEN,
    "operate/cli/azure.py:init_": GIVEN,
    "operate/cli/azure.py:verify_": GIVEN,
    "operate/cli/demo.py:start": OWN,
    "operate/cli/failures.py:_forget_stdout": "opens /dev/null",
    "operate/cli/init.py:_write": GIVEN,
    "operate/cli/init.py:command": GIVEN,
    "operate/cli/main.py:_open_closed_streams": "opens /dev/null",
    "operate/cli/migrate.py:rewrite": GIVEN,
    "operate/verify.py:_event_file": OWN,
    "operate/verifylong.py:_write": GIVEN,
    "queues/engine/database.py:_open": CHECKED,
    "queues/engine/filesystem.py:prepare": CHECKED,
    "spark/cli/stats.py:_write": GIVEN,
    "spark/events/container.py:local_copy": OWN,
    "spark/events/files.py:local_copy": OWN,
    "spark/events/files.py:publish": CHECKED,
    "spark/events/files.py:scratch": CHECKED,
    "spark/packing.py:_importable": "in the folder that Spark has made for the executor",
    "spark/packing.py:write_zip": GIVEN,
    "spark/tables/deltalog.py:_prepared": CHECKED,
    "stores/events/sink.py:_publish_file": SINK,
    "stores/events/sink.py:create_locked": SINK,
    "stores/events/sink.py:recover": SINK,
    "stores/events/sink.py:_open": CHECKED,
    "stores/payloads/opening.py:_write": CHECKED,
    "stores/payloads/opening.py:write": CHECKED,
    "support/private.py:make_directory": ITSELF,
    "support/private.py:make_file": ITSELF,
    "testing/worker.py:_start": OWN,
    "worker/pool/link.py:create_at": OWN,
    "worker/pool/link.py:open_at": OWN,
    "worker/pool/portablelink.py:__init__": OWN,
    "worker/pool/portablelink.py:_console": OWN,
    "worker/pool/streams.py:_in_file": OWN,
    "worker/pool/watcher.py:make_folder": OWN,
    "worker/upkeep/uploader.py:_alone": CHECKED,
    "worker/upkeep/uploader.py:_upload": CHECKED,
}


def _writes(call: ast.Call) -> bool:
    """Whether a call makes or opens something that it writes to."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    text = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant)]
    if name == "connect":
        return ast.unparse(call.func) == "sqlite3.connect"
    if name == "open":
        modes = [each for each in text if isinstance(each, str) and set(each) <= set("rwaxb+t")]
        flags = {each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute)}
        if ast.unparse(call.func) == "os.open":
            return "O_RDONLY" not in flags
        return any(set(mode) & set("wax+") for mode in modes if mode)
    return name in MAKERS


def writers() -> Iterator[str]:
    """The functions of aztask that make or write files, as ``file:function``."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                isinstance(each, ast.Call) and _writes(each) for each in ast.walk(node)
            ):
                yield f"{name}:{node.name}"


def test_every_function_that_writes_files_says_how_others_are_kept_out() -> None:
    assert sorted(set(writers())) == sorted(WRITERS)


def test_files_that_claim_to_check_their_places_do() -> None:
    for name in {each.partition(":")[0] for each, why in WRITERS.items() if why is CHECKED}:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
        assert called & CHECKS, name
