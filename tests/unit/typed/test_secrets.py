"""Arguments and results that are marked as secret: what is masked where aztask shows values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NewType, TypedDict, TypeVar

import pytest

from aztask import App, RetryPolicy, Secret, chain
from aztask.errors import TaskFailed
from aztask.message.template import Template
from aztask.operate.queues import arguments_of, peek
from aztask.operate.tasks import result
from aztask.support.display import hide, mask, unhide
from aztask.typed.annotations import is_secret
from aztask.typed.conversion import texts_in
from aztask.workflows.graphs import draw

CARD = "4111-1111-1111-1111"
Marked = Annotated[str, Secret]
Number = NewType("Number", Marked)
T = TypeVar("T", bound=Marked)


@dataclass
class Order:
    number: int
    card: Marked
    next: Order | None = None


@dataclass
class Plain:
    number: int
    next: Plain | None = None


class Pair(NamedTuple):
    card: Marked
    cents: int


class Keys(TypedDict):
    card: Marked


@pytest.mark.parametrize(
    "annotation",
    [
        Marked,
        Annotated[int, "other", Secret],
        Annotated[str, Secret("")],
        Marked | None,
        list[Marked],
        dict[str, tuple[Marked, ...]],
        Number,
        T,
        Order,
        list[Order],
        Pair,
        Keys | None,
    ],
)
def test_the_mark_may_be_anywhere_in_an_annotation(annotation: Any) -> None:
    assert is_secret(annotation)


@pytest.mark.parametrize("annotation", [str, None, Any, Plain, list[Plain], Annotated[str, "x"]])
def test_what_has_no_mark_is_not_secret(annotation: Any) -> None:
    assert not is_secret(annotation)


def test_the_texts_of_a_value_are_those_that_an_error_may_quote() -> None:
    found = set(
        texts_in({"a": [CARD, 12345, None, True, "no"], "b": {"c": b"bytes\xff", "d": "ä\n"}})
    )
    assert {CARD, "12345", "bytes\\xff"} <= found
    assert "True" not in found and "no" not in found and "None" not in found


def test_texts_are_masked_until_they_are_forgotten() -> None:
    hide("run", ["part", "part and more", "***"])
    assert mask("a part and more of it, and a part") == "a **** of it, and a ****"
    assert mask("***") == "***"
    unhide("run")
    assert mask("a part") == "a part"


@pytest.fixture
def app() -> Iterator[App]:
    with closing(App("shop", broker="local://:memory:", results="local://:memory:")) as made:

        @made.task(name="shop.charge", retry=RetryPolicy(max_retries=0))
        def charge(cents: int, card: Marked, *more: Marked, **options: Any) -> Marked:
            logging.getLogger("shop").warning("charging %s", card)
            if cents < 0:
                raise ValueError(f"no {cents} from {card} {more} {options}")
            return card

        @made.task(name="shop.save")
        def save(order: Order, **rest: Marked) -> int:
            return order.number

        yield made


def shown(app: App, queue: str = "default") -> list[Any]:
    found = peek(app, queue, 10).found
    each = [arguments_of(app, one.message, one.problem) for one in found]
    return [(one.args, one.kwargs, one.secret) for one in each]


def test_waiting_arguments_are_masked_by_position_and_by_name(app: App) -> None:
    charge, save = app.tasks["shop.charge"], app.tasks["shop.save"]
    charge.delay(1, CARD, CARD, note="plain")
    charge.delay(cents=1, card=CARD)
    save.delay(Order(1, CARD), other=CARD)
    assert shown(app) == [
        ((1, "****", "****"), {"note": "plain"}, True),
        ((), {"cents": 1, "card": "****"}, True),
        (("****",), {"other": "****"}, True),
    ]
    app.task(name="shop.plain")(lambda text: None).with_options(queue="plain").delay(CARD)
    assert shown(app, "plain") == [((CARD,), {}, False)]


def test_the_argument_behind_a_value_of_a_chain_is_masked(app: App) -> None:
    """Its own arguments come after the value of the task before it."""
    first = app.task(name="shop.first")(lambda: 1)
    step = app.tasks["shop.charge"].s(CARD, CARD)
    drawn = draw(chain(first.s(), step))
    assert drawn.count("****") == 2
    assert CARD not in drawn


def test_a_secret_is_in_no_header_of_its_message() -> None:
    with closing(App("shop", broker="local://:memory:", argsrepr=True)) as app:
        save = app.task(name="shop.save")(_save)
        save.delay(Order(1, CARD))
        app.task(name="shop.plain")(lambda text: None).delay("visible")
        secret, plain = app.broker.peek("default")
        assert secret.envelope.headers["argsrepr"] == "****"
        assert "visible" in plain.envelope.headers["argsrepr"]
        assert CARD not in repr(secret.envelope.headers)
        template = Template(app.codec, "shop.save", "default", secret=True)
        made = [template.envelope("a", {"order": CARD})]
        made += template.envelopes(["b"], ["order"], [[CARD]])
        assert all("kwargsrepr" not in each.headers for each in made)


def _save(order: Order) -> None: ...


def test_a_recorded_value_is_shown_masked_and_read_in_the_clear(app: App) -> None:
    with app.inline():
        sent = app.tasks["shop.charge"].delay(1, CARD)
        assert result(app, sent.id).value == "****"
        assert sent.get(timeout=0) == CARD


def test_an_error_that_quotes_a_secret_is_masked_in_its_text_and_its_traceback(app: App) -> None:
    with app.inline():
        sent = app.tasks["shop.charge"].delay(-12, CARD, "1234", note="plain")
        with pytest.raises(TaskFailed) as failed:
            sent.get(timeout=0)
        outcome = result(app, sent.id).latest.outcome
    assert outcome is not None
    for text in (outcome.error, outcome.traceback, str(failed.value)):
        assert CARD not in text and "1234" not in text
    assert outcome.error == "no -12 from **** ('****',) {'note': 'plain'}"
    assert mask(CARD) == CARD, "it is forgotten with its run"
