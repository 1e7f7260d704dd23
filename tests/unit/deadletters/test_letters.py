"""Dead letters as values: what they are called, and which a selection means."""

import pytest

from aztask import App, ConfigurationError
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.letters import DeadLetterView, Positions, Selection


def view(envelope, message=None, position=7, **fields):
    values = {"reason": "rejected", "description": "KeyError: 'x'", **fields}
    return DeadLetterView(
        "default", position, envelope, at=1.0, delivery_count=1, message=message, **values
    )


@pytest.fixture
def letter():
    app = App("shop", broker="local://:memory:")
    app.send("shop.add", [1], task_id="a")
    (peeked,) = app.broker.peek("default", limit=1)
    yield view(peeked.envelope, app.codec.from_envelope(peeked.envelope, "default"))
    app.close()


def test_a_dead_letter_is_known_by_several_names(letter):
    assert letter.names == ("a", "a:0:0", "@7")
    assert (letter.id, letter.task, letter.resubmit_count) == ("a", "shop.add", 0)
    assert letter.signature == "KeyError: <text>"


def test_one_that_cannot_be_read_has_its_position():
    odd = view(Envelope(b"\xff"), problem="there is no task header", description="")
    assert (odd.id, odd.task, odd.resubmit_count) == ("@7", None, None)
    assert odd.signature == "there is no task header"


def test_a_selection_joins_its_conditions(letter):
    assert Selection(everything=True).matches(letter)
    assert Selection(frozenset(["@7"]), task="shop.add", reason="rejected").matches(letter)
    assert not Selection(frozenset(["b"]), task="shop.add").matches(letter)
    assert not Selection(signature="KeyError: <n>").matches(letter)
    assert Selection(positions=Positions([7])).matches(letter)


def test_positions_alone_need_no_search():
    here = Positions([7])
    assert Selection(positions=here).only_positions() is here
    assert Selection(positions=here, task="shop.add").only_positions() is None


def test_an_empty_selection_never_means_all():
    with pytest.raises(ConfigurationError, match="or else all of them"):
        Selection()
    with pytest.raises(ConfigurationError, match="exclude each other"):
        Selection(task="shop.add", everything=True)
