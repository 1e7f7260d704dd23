"""Runs commands in one process that lacks what only Linux has, see tests/otherplatform.py.

The input is JSON: a list of command lines. The output is JSON: [exit code, stdout, stderr] of each.
"""

import contextlib
import io
import json
import sys

from aztask.operate.cli.main import run


def main() -> None:
    answers = []
    for arguments in json.load(sys.stdin):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
        answers.append([code, out.getvalue(), err.getvalue()])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
