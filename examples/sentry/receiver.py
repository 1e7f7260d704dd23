"""A stand-in for Sentry on this machine: takes events over HTTP and keeps them in a file.

``python receiver.py`` serves, ``python receiver.py dsn`` prints the address for SENTRY_DSN, and
``python receiver.py show`` prints what has arrived.
"""

import gzip
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DSN, EVENTS = Path("dsn"), Path("events.jsonl")


class Receiver(BaseHTTPRequestHandler):
    """Takes envelopes, as https://develop.sentry.dev/sdk/envelopes/ describes them."""

    def do_POST(self) -> None:
        """Append each item of the envelope to the file."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        lines = body.splitlines()[1:]
        with EVENTS.open("a") as file:
            for head, item in zip(lines[::2], lines[1::2], strict=False):
                if json.loads(head)["type"] in ("event", "transaction"):
                    file.write(item.decode() + "\n")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print no line for each request."""


def read_events() -> list[dict[str, Any]]:
    """All events and transactions that have arrived, in order."""
    return [json.loads(line) for line in EVENTS.read_text().splitlines()]


def main() -> None:
    """Serve, or print, as the command line says."""
    if "dsn" in sys.argv:
        while not DSN.exists():
            time.sleep(0.05)
        print(DSN.read_text())
    elif "show" in sys.argv:
        for event in read_events():
            trace = event["contexts"]["trace"]["trace_id"][:4]
            if event.get("type") == "transaction":
                print(f"{trace} transaction {event['transaction']}")
            elif "exception" in event:
                error = event["exception"]["values"][-1]
                print(f"{trace} {event['level']} {error['type']}: {error['value']}")
            else:
                print(f"{event['level']} {event['message']}")
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        temporary = DSN.with_suffix(".new")
        temporary.write_text(f"http://key@127.0.0.1:{server.server_port}/1")
        temporary.rename(DSN)
        server.serve_forever()


if __name__ == "__main__":
    main()
