"""The MCP server under the inspector of the protocol's own project, on its command line.

It is installed from npm when the tests run, with a Node.js of PyPI: Debian's is too old for it.
"""

import json
import os
import subprocess
import sys

import pytest
from dashboardshop import MODULE, PAYLOAD, fill, full, shop
from programs import newer_node, npm_package

from aztask.agents.queries import QUERIES
from aztask.operate.requests import KINDS

__all__ = ["fill", "full", "shop"]

INSPECTOR = ("@modelcontextprotocol/inspector", "2.12.0")


@pytest.fixture
def inspector(full, tmp_path):
    """Asks the server of a store with something of everything: the answer, and the exit code."""
    (tmp_path / "inspected.py").write_text(MODULE.format(place=full.app.address))
    programs = npm_package(*INSPECTOR)
    environment = {**os.environ, "PATH": os.pathsep.join([str(newer_node()), os.environ["PATH"]])}
    server = [sys.executable, "-m", "aztask", "-A", "inspected:app", "mcp"]

    answers = tmp_path / "answers"

    def ask(method, *given, options=()):
        command = [programs / "mcp-inspector", "--cli", *server, *options, "--method", method]
        # Node.js writes to files at once; what it has put into a pipe is lost if it exits.
        with answers.open("w+") as out:
            done = subprocess.run(
                [*command, *given],
                cwd=tmp_path,
                env=environment,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=60,
            )
        assert "Traceback" not in done.stderr, done.stderr
        return json.loads(answers.read_text() or done.stderr), done.returncode

    return ask


def test_the_inspector_finds_every_query_and_no_action_unless_they_are_allowed(inspector):
    found, code = inspector("tools/list")
    assert code == 0
    assert {each["name"] for each in found["tools"]} == set(QUERIES)
    assert all(each["annotations"]["readOnlyHint"] for each in found["tools"])
    found, code = inspector("tools/list", options=["--allow-actions", "--role", "configure"])
    assert code == 0
    actions = {each["name"]: each for each in found["tools"] if each["name"] not in QUERIES}
    assert actions.keys() == {name.replace("-", "_") for name in KINDS}
    assert all(each["annotations"]["destructiveHint"] for each in actions.values())


def test_the_inspector_reads_tools_resources_and_prompts(inspector):
    found, code = inspector("tools/call", "--tool-name", "queues")
    assert (code, found["isError"]) == (0, False)
    (queue,) = json.loads(found["content"][0]["text"])["items"]
    assert (queue["queue"], queue["dead"]) == ("default", 2)
    found, code = inspector("resources/read", "--uri", "aztask://task/dead-1")
    assert code == 0
    assert PAYLOAD not in found["contents"][0]["text"], "what a task wrote is marked as data"
    found, code = inspector("resources/templates/list")
    assert "aztask://task/{id}" in [each["uriTemplate"] for each in found["resourceTemplates"]]
    found, code = inspector("prompts/list")
    assert "why_is_this_queue_late" in [each["name"] for each in found["prompts"]]
    asked = ("--prompt-name", "why_is_this_queue_late", "--prompt-args", "queue=default")
    found, code = inspector("prompts/get", *asked)
    assert (code, "default" in found["messages"][0]["content"]["text"]) == (0, True)


@pytest.mark.parametrize(
    ("tool", "given", "said"),
    [
        ("task", "id=nobody", "neither the result store nor the events know a task 'nobody'"),
        ("task", "idd=dead-1", "Did you mean 'id'?"),
        ("replay", "queue=default", "Tool 'replay' not found on server."),
    ],
)
def test_a_wrong_call_is_an_error_of_one_line(inspector, tool, given, said):
    found, code = inspector("tools/call", "--tool-name", tool, "--tool-arg", given)
    assert code != 0
    assert said in json.dumps(found)
