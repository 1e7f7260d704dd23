"""The collector of a process that serves for long."""

import subprocess
import sys

from aztask.support.garbage import THRESHOLDS

PROGRAM = """
import gc
from aztask.support.garbage import collect_rarely
collect_rarely()
assert not gc.get_objects(), "everything that exists is skipped"
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect(), "what comes later is still collected"
print(*gc.get_threshold())
"""


def test_what_was_imported_is_skipped_and_what_comes_later_collected():
    found = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True)
    assert tuple(map(int, found.split())) == THRESHOLDS
