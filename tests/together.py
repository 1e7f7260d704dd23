"""Run commands side by side: ``python tests/together.py mypy -- pytest --collect-only``.

Each one's output is shown when it ends. The first failure is the exit status; all of them end.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby


def main(arguments: list[str]) -> int:
    """Run the commands, which ``--`` separates."""
    parts = groupby(arguments, lambda argument: argument == "--")
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for separates, command in parts
        if not separates
    ]
    failed = 0
    for process in running:
        output = process.communicate()[0]
        sys.stdout.buffer.write(output)
        sys.stdout.flush()
        failed = failed or process.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
