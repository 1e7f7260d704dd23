"""The state of a session is the worker's to keep."""

from aztask.session import MemoryState, Session


def test_the_state_is_loaded_and_stored_by_its_keeper():
    keeper = MemoryState()
    session = Session("cart-7", keeper)
    assert (session.id, session.state) == ("cart-7", None)
    session.state = {"items": 2}
    session.state = (session.state["items"], "more")
    assert keeper.load() == (2, "more")
    assert repr(session) == "<Session cart-7>"
