"""What a failed member does to its chord."""

from __future__ import annotations

from pathlib import Path

from celery import Celery, states
from celery.app.task import Context


def test_a_body_that_is_in_a_chord_itself_fails_with_the_members_error(tmp_path: Path) -> None:
    """Celery asks for the traceback of the error then."""
    here = f"aztask+local://{tmp_path}"
    app = Celery("shop", broker=f"{here}/q.db", backend=f"{here}/r.db", set_as_current=False)

    @app.task(name="total", shared=False)
    def total(values: list[int]) -> int:
        return sum(values)

    outer = total.s().set(task_id="outer")
    inner = total.s().set(task_id="inner", group_id="g2", group_index=0, chord=outer)
    app.backend.apply_chord(("g1", []), inner)
    app.backend.set_chord_size("g1", 1)
    app.backend.set_chord_size("g2", 2)
    request = Context({"id": "member", "group": "g1", "group_index": 0, "chord": inner})
    app.backend.on_chord_part_return(request, states.FAILURE, ValueError("bad"))
    assert str(app.AsyncResult("inner").result) == "Dependency member raised ValueError('bad')"
    app.close()
