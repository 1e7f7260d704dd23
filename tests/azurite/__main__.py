"""``python -m tests.azurite [PORT]``: the storage emulator for a developer, until Ctrl-C.

Its data lies in a temporary folder. Without a port it has queues, tables and blobs, on the ports
that UseDevelopmentStorage=true means; on a port of its own queues alone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.azurite import Azurite

DEVELOPMENT_PORTS = {"queue": 10001, "table": 10002, "blob": 10000}


def main() -> int:
    ports = {"queue": int(sys.argv[1])} if len(sys.argv) > 1 else DEVELOPMENT_PORTS
    started: list[Azurite] = []
    with tempfile.TemporaryDirectory(prefix="aztask-azurite-") as folder:
        try:
            for service, port in ports.items():
                started.append(Azurite(Path(folder, service), port=port, service=service))
            standard = ports == DEVELOPMENT_PORTS
            address = "UseDevelopmentStorage=true" if standard else started[0].connection_string
            print(f"Azurite is running; use AZTASK_BROKER='{address}'")
            if standard:
                print(f"and for results AZTASK_RESULTS='{address}'")
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            for azurite in started:
                azurite.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
