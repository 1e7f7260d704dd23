"""A client: asks one question and prints the answer as it comes.

Usage: python client.py ADDRESS QUESTION
"""

import json
import sys
import time

import httpx


def main(address: str, question: str) -> None:
    """Ask, and follow the events of the answer to the end."""
    for _ in range(100):  # the server may still be starting
        try:
            httpx.get(address)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    chat = {"messages": [{"role": "user", "text": question}]}
    answer = httpx.post(f"{address}/answers", json=chat).raise_for_status().json()["id"]
    event = "message"
    with httpx.stream("GET", f"{address}/answers/{answer}", timeout=60) as stream:
        for line in stream.iter_lines():
            name, _, value = line.partition(":")
            if name == "event":
                event = value.strip()
            elif name == "data":
                show(event, value.strip())
                event = "message"


def show(event: str, data: str) -> None:
    """Print one event of an answer."""
    if event == "message":
        print(json.loads(data), end="", flush=True)
    elif event == "reset":
        print("\n(it begins anew)")
    else:
        print(f"\n({event}: {json.loads(data)})" if data else f"\n({event})")


if __name__ == "__main__":
    main(*sys.argv[1:])
