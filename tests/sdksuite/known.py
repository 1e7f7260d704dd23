"""The tests of the suite that fail against the emulator, each with its cause.

A test is named ``MODULE.CLASS.TEST`` without its parameters; a module with its folders, as in
``tests.mgmt_tests.test_mgmt_queues``. Every other test must pass, and every test named here must
fail: the list is kept true in both directions.
"""

from __future__ import annotations

FAILING: dict[str, str] = {}
