"""The state of a session is the worker's to keep."""

from aztask.session import Session


def test_the_state_is_loaded_and_stored_through_the_worker():
    stored = []
    session = Session("cart-7", load=lambda: stored[-1] if stored else None, store=stored.append)
    assert (session.id, session.state) == ("cart-7", None)
    session.state = {"items": 2}
    session.state = (session.state["items"], "more")
    assert stored == [{"items": 2}, (2, "more")]
    assert repr(session) == "<Session cart-7>"
