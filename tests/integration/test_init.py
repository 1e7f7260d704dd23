"""The project that ``aztask init`` writes: its own tests, its settings, and the demo's advice."""

import os
import re
import subprocess
import sys

import pytest
from harness import ROOT

from aztask.config import parse_broker, parse_results
from aztask.queues.servicebus.admin import ADMIN_VARIABLE


def bash(folder, *commands, **environment):
    """Run commands in one shell, as a user who pastes them; returns the ended process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
    script = [f'aztask() {{ {sys.executable} -m aztask "$@"; }}', "set -e", *commands]
    return subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def project(tmp_path):
    ended = bash(tmp_path, "aztask init shop")
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "shop"


def test_its_tests_pass_and_its_types_are_right(project):
    ended = bash(project, f"{sys.executable} -m pytest -q -p no:cacheprovider")
    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout
    ended = bash(project, f"{sys.executable} -m mypy", MYPYPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout
    assert "no issues found in 4 source files" in ended.stdout


def test_the_commands_of_its_readme_work_on_this_machine(project):
    block = re.findall(r"```console\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)[0]
    ended = bash(project, *(line.removeprefix("$ ") for line in block.splitlines()))
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"shop\.count_words +succeeded", ended.stdout)


def test_its_settings_for_the_emulator_work(project, bus):
    bus.create_queue("default")
    settings = project / "settings" / "emulator.sh"
    settings.write_text(settings.read_text().replace(":5672;", f":{bus.port};"))
    ended = bash(
        project,
        ". settings/emulator.sh",
        "aztask send shop.add_up --args '[[1.5, 2]]' --task-id sum",
        "aztask worker --burst",
        "aztask result sum",
        **{ADMIN_VARIABLE: bus.admin_connection_string},
    )
    assert ended.returncode == 0, ended.stderr
    assert "3.5" in ended.stdout


def settings_of(path):
    """What a file of settings sets, read as its shell reads it."""
    line = {
        ".sh": r"export (\w+)='([^']*)'",
        ".ps1": r"\$env:(\w+) = '([^']*)'",
        ".cmd": r'@set "(\w+)=([^"]*)"',
    }
    remark = "@rem " if path.suffix == ".cmd" else "# "
    lines = path.read_bytes().decode().split("\r\n" if path.suffix == ".cmd" else "\n")
    assert lines.pop() == ""
    called = path.relative_to(path.parents[1])
    typed = str(called).replace("/", "\\") if path.suffix == ".cmd" else f". {called}"
    assert lines[0] == f"{remark}Type: {typed}"
    found = {each: re.fullmatch(line[path.suffix], each) for each in lines}
    assert all(match or each.startswith(remark) for each, match in found.items()), lines
    return dict(match.groups() for match in found.values() if match)


@pytest.mark.parametrize("place", ["local", "emulator", "azure"])
def test_its_settings_are_the_same_addresses_in_each_shell(project, place):
    bash_reads, powershell, cmd = (
        settings_of(project / "settings" / f"{place}.{shell}") for shell in ("sh", "ps1", "cmd")
    )
    assert bash_reads == powershell == cmd
    assert bash_reads["AZTASK_APP"] == "shop.app:app"
    parse_broker(bash_reads["AZTASK_BROKER"])
    parse_results(bash_reads["AZTASK_RESULTS"])


@pytest.mark.parametrize("command", ["demo", "init"])
def test_the_advice_on_windows_is_for_powershell(tmp_path, command):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "run.py").write_text(
        "import platform, sys\n"
        "platform.system = lambda: 'Windows'\n"
        "from aztask.operate.cli.main import main\n"
        "main()\n"
    )
    given = "a.py" if command == "demo" else "shop"
    ended = bash(tmp_path, f"{sys.executable} run.py {command} {given}")
    assert ended.returncode == 0, ended.stderr
    shown = ended.stderr.splitlines()
    assert "  . settings/local.ps1" in shown
    assert '  aztask send shop.add_up --args "[[1.5, 2]]"' in shown
    assert not any("&&" in line or ".sh" in line for line in shown)


def test_what_the_demo_says_to_try_works_when_pasted(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.py").write_text("x = 1\n")
    ended = bash(tmp_path, f"aztask demo {tree}")
    assert ended.returncode == 0, ended.stderr
    assert "Try next" not in ended.stdout
    commands = ended.stderr.partition("Try next:\n")[2].splitlines()
    assert len(commands) == 5
    ended = bash(tmp_path, *commands)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"shop\.count_words +succeeded", ended.stdout)
    ended = bash(tmp_path, f"aztask demo {tree} --json")
    assert "Try next" not in ended.stderr
