"""What state a schedule is shown in: that of its row, and for one time (``at=``) how it ended."""

from __future__ import annotations

from typing import Final

from aztask.errors import CodecError, ConfigurationError
from aztask.schedules.engine import KEPT, ScheduleEngine
from aztask.schedules.stored import SENT, TRIGGERED
from aztask.schedules.triggers import At
from aztask.schedules.view import View
from aztask.stores.records.damage import Damaged

MISSED: Final = "missed"
ENDED: Final = "ended"


def state_of(engine: ScheduleEngine, view: View, now: float) -> str:
    """``active``, ``paused`` or ``unclaimed``, see `View.state_at`; ``missed`` or ``ended``.

    A schedule of one time is ``ended`` once its task was sent, and ``missed`` if it never will be,
    because the time had passed when a worker first knew of it, or when it was resumed. Raises
    BrokerUnavailable.
    """
    state = view.state_at(now)
    if state == "paused" or view.open:
        return state
    try:
        trigger = engine.definition(view).trigger
    except (CodecError, ConfigurationError, Damaged):
        return state  # the caller says what is wrong with it
    if not isinstance(trigger, At) or trigger.at > view.schedule.watermark:
        return state
    made = engine.history(view.name, KEPT)
    sent = any(each.state == SENT and each.kind != TRIGGERED for each in made)
    return ENDED if sent else MISSED
