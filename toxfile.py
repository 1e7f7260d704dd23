"""Hooks into tox: environments share one directory, and each says how many minutes it took.

The environments of tox.ini that have the same ``env_dir`` hold the same packages. Tox records an
environment's name in its directory and makes the directory anew when it finds another name; so the
name is taken out when an environment is done. Without this the tests pass too, after one
installation for each environment instead of one for all.
"""

import json
import sys
from pathlib import Path

from tox.execute.api import Outcome
from tox.plugin import impl
from tox.tox_env.api import ToxEnv


@impl
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[Outcome]) -> None:
    """Called after an environment's commands, whether they succeeded or not."""
    minutes = sum(outcome.elapsed for outcome in outcomes) / 60
    state = "passed" if exit_code == 0 else f"failed (exit {exit_code})"
    sys.stdout.write(f"{tox_env.conf.name}: {state} after {minutes:.1f} minutes\n")
    sys.stdout.flush()
    record = Path(tox_env.env_dir) / ".tox-info.json"
    if record.is_file():
        known = json.loads(record.read_text())
        known.pop("ToxEnv", None)
        record.write_text(json.dumps(known))
