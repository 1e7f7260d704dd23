"""Attacks of one who may read and send, but has no key: on each broker, old signatures or not.

Each attack is a function that gives what an attacker would send, and the reason of its dead
letter. It would start a task whose key is the function's name. All attacks of a broker meet the
same worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
from azurite import Azurite
from azurite import running as azurite_running
from bus import bus_site
from harness import Site, site_in
from ledger_app import silent, work
from storage import storage_site

from aztask import App, chain
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.headers import SIGNATURE, SIGNATURE_2
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.base import QueueOptions
from aztask.testing import emulator

KEY: Final = "a-key-that-no-attacker-knows-0123456789"
OTHER_KEY: Final = b"a-key-that-the-attacker-has-made-up-0123"
BROKERS: Final = ("local", "storagequeue", "servicebus")
REFUSED: Final = "undecodable"
OUT_OF_TURN: Final = "out-of-turn"


@dataclass
class World:
    """site: the broker and its worker. app: of its owner, whose messages the attacker reads."""

    site: Site
    app: App
    old: bool

    def signed(self, name: str, codec: Codec | None = None, **fields: Any) -> Envelope:
        """A message of the owner, who sends it here or elsewhere."""
        codec = codec or self.app.codec
        body, content_type, encoding = codec.encode_arguments([name], {})
        given = {"task": work.name, "queue": "default", **fields}
        return codec.to_envelope(
            TaskMessage(
                id=name, body=body, content_type=content_type, content_encoding=encoding, **given
            )
        )

    def send(self, envelope: Envelope) -> None:
        self.app.broker.send("default", [envelope])


Sent: TypeAlias = tuple[Envelope, str]
Attack: TypeAlias = Callable[[World], Sent]


def unsigned(world: World) -> Sent:
    return world.signed("unsigned", Codec()), REFUSED


def of_another_key(world: World) -> Sent:
    return world.signed("of_another_key", Codec(signing_keys=[OTHER_KEY])), REFUSED


def of_another_environment(world: World) -> Sent:
    """The keys are the same: staging has them, too."""
    rules = SignatureRules(old=world.old, environment="staging")
    return world.signed(
        "of_another_environment", Codec(signing_keys=[KEY.encode()], signatures=rules)
    ), REFUSED


def with_another_body(world: World) -> Sent:
    honest = world.signed("honest")
    body = world.signed("with_another_body", Codec()).body
    return replace(honest, body=body), REFUSED


def with_another_task(world: World) -> Sent:
    signed = world.signed("with_another_task", task=silent.name)
    return replace(signed, headers={**signed.headers, "task": work.name}), REFUSED


def with_another_id(world: World) -> Sent:
    """So that it runs although it has run."""
    signed = world.signed("with_another_id")
    return replace(signed, headers={**signed.headers, "id": "new"}), REFUSED


def with_one_header_more(world: World) -> Sent:
    signed = world.signed("with_one_header_more")
    return replace(signed, headers={**signed.headers, "aztask-resubmit-count": 7}), REFUSED


def with_the_old_signature_alone(world: World) -> Sent:
    """It covers less; a message that has both is announced by its content type."""
    signed = world.signed("with_the_old_signature_alone")
    headers = {name: each for name, each in signed.headers.items() if name != SIGNATURE_2}
    return replace(signed, headers=headers), REFUSED


def without_any_signature(world: World) -> Sent:
    signed = world.signed("without_any_signature")
    gone = (SIGNATURE, SIGNATURE_2)
    headers = {name: each for name, each in signed.headers.items() if name not in gone}
    return replace(signed, headers=headers), REFUSED


def from_another_queue(world: World) -> Sent:
    return world.signed("from_another_queue", queue="other"), REFUSED


def of_a_stored_step(world: World) -> Sent:
    """Read from the result store, before the step that it follows has run."""
    _, envelope = _stored_step(world, "of_a_stored_step")
    return envelope, REFUSED


def of_a_step_that_a_former_release_stored(world: World) -> Sent:
    """Such a release signed it as it signed what it sent, so nothing but its turn tells them."""
    message, _ = _stored_step(world, "of_a_step_that_a_former_release_stored")
    with closing(_app(world.site, old=True, broker=world.site.broker)) as former:
        return former.codec.to_envelope(message), OUT_OF_TURN


ATTACKS: Final[tuple[Attack, ...]] = (
    unsigned,
    of_another_key,
    of_another_environment,
    with_another_body,
    with_another_task,
    with_another_id,
    with_one_header_more,
    with_the_old_signature_alone,
    without_any_signature,
    from_another_queue,
    of_a_stored_step,
    of_a_step_that_a_former_release_stored,
)


def _app(site: Site, *, old: bool, broker: str) -> App:
    """An app of the site's owner; its messages go to another broker, if one is given."""
    owner = site.app().owner.broker
    return App("ledger", broker=broker, results=site.results, owner=owner, old_signatures=old)


def _stored_step(world: World, name: str) -> tuple[TaskMessage, Envelope]:
    """The second step of a workflow whose first one never runs: what the result store has of it."""
    with closing(_app(world.site, old=world.old, broker="local://:memory:")) as elsewhere:
        step = elsewhere.task(name=work.name)(lambda key: key)
        chain(step.si("never"), step.si(name)).delay(workflow_id=f"w-{name}")
        graphs = elsewhere.workflows.engine.graphs
        root = graphs.root(f"w-{name}")
        assert root is not None
        _, envelope = graphs.messages(f"w-{name}", root, [2])[2]
        return Codec().from_envelope(envelope, "default", stored="any"), envelope


# -- the worlds -----------------------------------------------------------------------------------


@contextmanager
def _site(broker: str, folder: Path) -> Iterator[Site]:
    if broker == "local":
        with site_in(folder / "site", joint=False) as made:
            made.app().broker.declare("default")
            yield made
    elif broker == "storagequeue":
        server: Azurite
        with (
            azurite_running(folder / "azurite") as server,
            storage_site(folder / "site", server) as made,
        ):
            yield made
    else:
        with emulator() as bus, bus_site(folder / "site", bus, QueueOptions(lease=60.0)) as made:
            yield made


@dataclass
class Attacked:
    """started: how often each task has started. letters: (reason, description) by message id."""

    started: dict[str, int]
    reasons: dict[str, str]
    letters: dict[str, tuple[str, str]]


@pytest.fixture(
    scope="module",
    params=[(broker, old) for broker in BROKERS for old in (True, False)],
    ids=lambda param: f"{param[0]}-{'old too' if param[1] else 'new only'}",
)
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    """What became of all attacks on a broker, and of a message that was recorded and sent again."""
    broker, old = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZTASK_SIGNING_KEYS", KEY)
        patch.setenv("AZTASK_ID_KEY", KEY)
        with _site(broker, tmp_path_factory.mktemp("attacks")) as site:
            site.extra["LEDGER_OPTIONS"] = json.dumps({"old_signatures": old})
            with closing(_app(site, old=old, broker=site.broker)) as app:
                world = World(site, app, old)
                honest = world.signed("once")
                world.send(honest)
                reasons = {}
                for attack in ATTACKS:
                    envelope, reasons[attack.__name__] = attack(world)
                    world.send(replace(envelope, message_id=attack.__name__))
                _burst(site)
                world.send(honest)
                world.send(replace(honest, message_id="another"))
                _burst(site)
                found = {
                    each.envelope.message_id: (each.reason, each.description)
                    for each in DeadLetters(app, "default").list()
                }
                assert found.keys() == reasons.keys(), "each attack, and nothing else"
                yield Attacked(site.counts("start"), reasons, found)


def _burst(site: Site) -> None:
    worker = site.worker("-Q", "default", "--burst")
    assert worker.wait(120) == 0, worker.log


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_it_starts_nothing_and_is_a_dead_letter_with_its_reason(
    attacked: Attacked, attack: Attack
) -> None:
    name = attack.__name__
    assert name not in attacked.started
    reason, description = attacked.letters[name]
    assert reason == attacked.reasons[name]
    assert description


def test_what_was_recorded_and_is_sent_again_runs_once(attacked: Attacked) -> None:
    assert attacked.started == {"once": 1}
