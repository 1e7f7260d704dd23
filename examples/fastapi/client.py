"""A client: starts a report and prints its progress.

Usage: python client.py ADDRESS TITLE PAGES
"""

import json
import sys
import time

import httpx


def main(address: str, title: str, pages: str) -> None:
    """Start the report and follow its events to the end."""
    for _ in range(100):  # the server may still be starting
        try:
            httpx.get(address)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    new = {"title": title, "pages": int(pages)}
    report = httpx.post(f"{address}/reports", json=new).raise_for_status().json()["id"]
    with httpx.stream("GET", f"{address}/reports/{report}/events", timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                state = json.loads(line.removeprefix("data: "))
                print(f"{state['done']} of {state['total']} {state['state']} {state['text']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
