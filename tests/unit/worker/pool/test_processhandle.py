"""The fork server as a copy of a process: what it keeps, how it ends, and when there is none."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, subprocess, sys, threading
from aztask.worker.pool.forking import ProcessHandle
from aztask.worker.pool.forking import first_server

def opened(pid):
    return {os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")}

def timed_out(process):
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return True

print("said once")
pipe = os.pipe()
server = first_server()
process = server._process
assert isinstance(process, ProcessHandle)
answer = {"early": timed_out(process)}
while open(f"/proc/{process._pid}/comm").read() != "aztask-fork\\n":
    pass
answer["pipe"] = os.readlink(f"/proc/self/fd/{pipe[0]}") in opened(process._pid)
answer["session"] = os.getsid(process._pid) == process._pid
getattr(process, sys.argv[1], server.close)()
process.wait(5)
server.close()
server.close()
answer["left"] = os.path.exists(f"/proc/{process._pid}")
threading.Thread(target=threading.Event().wait, daemon=True).start()
answer["beside threads"] = first_server() is not None
print(json.dumps(answer))
"""


@pytest.mark.parametrize("end", ["kill", "close"])
def test_it_keeps_nothing_and_ends(end):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    said, answer = ended.stdout.decode().splitlines()
    assert said == "said once"
    assert json.loads(answer) == {
        "early": True,
        "pipe": False,
        "session": True,
        "left": False,
        "beside threads": False,
    }
