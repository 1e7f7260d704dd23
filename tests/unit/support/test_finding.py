from aztask.errors import QueueNotFound
from aztask.support.finding import Level, failed, fine, problem, warning


def test_a_finding_is_one_line_with_what_to_do_next():
    assert str(fine("queue a", "exists", "it exists")) == "queue a: it exists"
    assert (
        str(warning("clock", "clock", "it is off", "correct it")) == "clock: it is off; correct it"
    )


def test_findings_are_compared_without_their_errors():
    error = QueueNotFound("gone")
    assert problem("a", "b", "c", "d", error) == problem("a", "b", "c", "d")
    assert failed("a", "b", error).level is Level.PROBLEM
    assert failed("a", "b", error).text == "gone"
