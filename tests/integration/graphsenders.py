"""Senders of workflows in processes of their own, which a test may kill while they send."""

from __future__ import annotations

import subprocess
import sys

from harness import Site


def send_in_process(site: Site, code: str, failpoint: str = "") -> int:
    """Run `code`, which starts a workflow, in a process of its own; returns its exit code."""
    extra = {"AZTASK_FAILPOINT": failpoint} if failpoint else {}
    program = f"from graphs import *\n{code}\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**site.environment, **extra},
        cwd=site.folder,
        timeout=60,
        check=False,
    )
    return done.returncode
