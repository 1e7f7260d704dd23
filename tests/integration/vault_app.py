"""Tasks that put a secret into every place that encryption covers: see `test_nothing_in_clear`."""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from aztask import App, Context, Reject, Retry, RetryPolicy, chain
from aztask.app.options import AppOptions

SECRET = "4111-1111-1111-1111"


class FernetCodec:
    """A team's own codec, of which aztask knows nothing."""

    name = "fernet"

    def __init__(self) -> None:
        self._fernet = Fernet(b"5" * 43 + b"=")

    def encode(self, data: bytes, bound: bytes) -> bytes:
        return b64decode(self._fernet.encrypt(sha256(bound).digest() + data), b"-_")

    def decode(self, data: bytes, bound: bytes) -> bytes:
        found = self._fernet.decrypt(b64encode(data, b"-_"))
        if found[:32] != sha256(bound).digest():
            raise InvalidToken
        return found[32:]


CODEC: AppOptions = {"content_codec": FernetCodec()}
app = App(
    "vault",
    broker=os.environ.get("LEDGER_BROKER"),  # the test itself imports this for the codec alone
    results=os.environ.get("LEDGER_RESULTS"),
    payloads=os.environ.get("VAULT_PAYLOADS", "./payloads"),
    payload_threshold=8192,
    retry=RetryPolicy(max_retries=0),
    **CODEC if "VAULT_CODEC" in os.environ else {},
)
SESSIONS = "carts"
HAS_SESSIONS = "VAULT_SESSIONS" in os.environ
if HAS_SESSIONS:
    app.queue(SESSIONS, sessions=True)
app.limit("customer", rate="1/m", key=lambda card, **_: card)
app.limit("seat", concurrency=1, key=lambda card, **_: card)


def mark(name: str) -> None:
    (Path(os.environ["LEDGER"]).parent / f"mark-{name}").touch()


@app.task
def returns(card: str) -> str:
    return card


@app.task
def large(card: str, data: str) -> str:
    return data


@app.task
def fails(card: str) -> None:
    raise ValueError(f"the card {card} was refused")


@app.task
def rejects(card: str) -> None:
    raise Reject("refused", f"the card {card}")


@app.task
def not_plain(card: str) -> object:
    return {card: object()}


@app.task(retry=RetryPolicy(max_retries=3, delay=3600.0))
def waits_for_its_retry(card: str) -> None:
    raise Retry(f"again, {card}")


@app.task_with_context(retry=RetryPolicy(max_retries=3, delay=3600.0))
def saves(context: Context, card: str) -> None:
    context.checkpoint({"card": card})
    raise ValueError(f"after the checkpoint {card}")


@app.task_with_context
def runs_on(context: Context, card: str) -> None:
    context.checkpoint(card)
    mark("runs")
    for _ in range(600):
        time.sleep(0.1)
        if (Path(os.environ["LEDGER"]).parent / "mark-end").exists():
            return


def charged(card: str) -> str:
    return card


def refused(card: str) -> None:
    raise ValueError(f"the step of {card}")


@app.task_with_context
def flow(context: Context, card: str) -> None:
    context.step("charge", charged, card)
    context.emit(f"part of {card}")
    context.wait_for("approved", timeout=3600)
    context.step("again", refused, card, retry=RetryPolicy(max_retries=3, delay=3600.0))


@app.task(unique=lambda card: card)
def once(card: str) -> str:
    return card


@app.task(unique=lambda card: card, debounce=3600.0)
def later(card: str) -> str:
    return card


@app.task(limits=["customer", "seat"])
def limited(card: str) -> str:
    return card


@app.task
def joined(values: object, card: str) -> object:
    return values


@app.task_with_context
def remembers(context: Context, card: str) -> None:
    assert context.session is not None
    context.session.state = {"card": card, "before": context.session.state}


def send_all() -> None:
    """Everything that a worker is to meet, and what is to wait where it is stored."""
    for task in (returns, fails, rejects, not_plain, waits_for_its_retry, saves, runs_on, flow):
        app.send(task.name, [SECRET], task_id=task.name)
    app.send(large.name, [SECRET, SECRET * 2000], task_id=large.name)
    for number in range(3):
        app.send(limited.name, [SECRET], task_id=f"limited-{number}")
    app.send(once.name, [SECRET], task_id=once.name, delay=3600.0)
    app.send(later.name, [SECRET])
    chain(returns.s(SECRET), joined.s(SECRET), runs_on.si(SECRET)).delay(workflow_id="runs")
    chain(fails.si(SECRET), joined.s(SECRET)).delay(workflow_id="fails")
    if HAS_SESSIONS:
        app.send(remembers.name, [SECRET], task_id=remembers.name, queue=SESSIONS, session="buyer")
    app.schedules.create("yearly", returns.s(SECRET), cron="0 6 1 1 *")
    app.close()


if __name__ == "__main__":
    send_all()
