"""``python -m tests.azurite [PORT]``: the Storage queue emulator for a developer, until Ctrl-C.

Its data lies in a temporary folder. The default port is the one that UseDevelopmentStorage=true
means, 10001.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.azurite import Azurite, NodeMissing

DEVELOPMENT_PORT = 10001


def main() -> int:
    port = int(sys.argv[1]) if len(sys.argv) > 1 else DEVELOPMENT_PORT
    with tempfile.TemporaryDirectory(prefix="aztask-azurite-") as folder:
        try:
            azurite = Azurite(Path(folder), port=port)
        except (NodeMissing, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        standard = port == DEVELOPMENT_PORT
        address = "UseDevelopmentStorage=true" if standard else azurite.connection_string
        print(f"Azurite is running; use AZTASK_BROKER='{address}'")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        azurite.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
