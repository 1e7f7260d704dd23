"""Actions of a visitor: the page that counts and asks, the act itself, and the form for editing.

Rules
1. Nothing is done before the visitor has seen the count, and confirmed it. If there is more by
   then, the page asks again.
2. The route has checked the form's token. The role is checked here, each time.
3. What the visitor sends is a request of `aztask.operate.requests`, as an agent's is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from markupsafe import Markup, escape

from aztask.dashboard.access import Visitor
from aztask.dashboard.site import Shown, Site
from aztask.errors import AztaskError, ConfigurationError, NotFound
from aztask.operate.action import Action
from aztask.operate.deadletters import DeadLetters, Selection
from aztask.operate.jobrunner import FROM_COUNT, make_job
from aztask.operate.queues import arguments_of
from aztask.operate.requests import RequestKind, Role, kind_of, prepare
from aztask.support.display import mask, safe_str

VIA: Final = "page"
HIDDEN: Final = ("args", "kwargs")
"""Values of a request that are in the form's body, and not in the address."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request of a visitor. confirmed: the count that the visitor saw; None before that."""

    site: Site
    visitor: Visitor
    name: str
    values: Mapping[str, str]
    confirmed: int | None = None

    def given(self) -> dict[str, str]:
        """The values that are not empty."""
        return {name: value for name, value in self.values.items() if value.strip()}


def confirmation(asked: PageRequest) -> tuple[int, Shown]:
    """The status and the page that says what would be done, and asks; or a form for its values."""
    kind = kind_of(asked.name)
    if asked.visitor.role < kind.role:
        return _forbidden(kind)
    try:
        action = prepare(asked.site.app, kind.name, asked.values)
    except ConfigurationError as error:
        return 200, _form(asked, kind, safe_str(error, 600) if asked.given() else "")
    return 200, _question(asked, kind, action)


def act(asked: PageRequest) -> tuple[int, Shown] | str:
    """Do it, or make a job of it; returns where its result is, or the status and a refusal."""
    kind = kind_of(asked.name)
    if asked.visitor.role < kind.role:
        return _forbidden(kind)
    action = prepare(asked.site.app, kind.name, asked.values)
    if asked.confirmed is None or action.count > asked.confirmed:
        more = "" if asked.confirmed is None else "There are more now: look again, and confirm."
        return 200, _question(asked, kind, action, more)
    if kind.many and action.count >= FROM_COUNT:
        key = make_job(action, kind.name, asked.given(), by=asked.visitor.name, via=VIA)
        asked.site.forget()
        return f"/jobs?{urlencode({'id': key})}"
    try:
        action.act(by=asked.visitor.name, via=VIA)
    except AztaskError:
        if not action.entry:
            raise
    finally:
        asked.site.forget()
    if not action.entry:
        text = "It was done, but the result store did not answer, and the audit has no entry of it."
        return 200, Shown("failed", "Done", {"text": text})
    return f"/audit?{urlencode({'id': action.entry})}"


def _forbidden(kind: RequestKind) -> tuple[int, Shown]:
    text = f"Your role may not do this: it needs the role {kind.role.name.lower()}."
    return 403, Shown("failed", "Nothing was done", {"text": text})


def _question(asked: PageRequest, kind: RequestKind, action: Action[Any], more: str = "") -> Shown:
    left_out = getattr(action, "left_out", None)
    hidden = {name: _kept(asked.values[name]) for name in HIDDEN if name in asked.given()}
    address = {name: value for name, value in asked.given().items() if name not in HIDDEN}
    values = {
        "kind": kind,
        "action": action,
        "text": str(action),
        "address": address,
        "texts": hidden,
        "more": more,
        "left_out": left_out,
        "unseen": getattr(action, "hidden", ""),
        "damaged": getattr(action, "damaged", ()),
    }
    return Shown("act", kind.title, values)


def _form(asked: PageRequest, kind: RequestKind, problem: str) -> Shown:
    values = {"kind": kind, "given": asked.values, "problem": problem}
    return Shown("actform", kind.title, values)


def _kept(text: str) -> Markup:
    """A JSON text as it goes through a form: ASCII, so that nothing in it is shown otherwise."""
    return escape(json.dumps(json.loads(text)))


def edit_form(site: Site, visitor: Visitor, queue: str, task_id: str) -> tuple[int, Shown]:
    """The form for the arguments of a dead letter. Raises NotFound, ConfigurationError."""
    kind = kind_of("edit")
    if visitor.role < max(kind.role, site.values_role, Role.ACT):
        return _forbidden(kind)
    letters = DeadLetters(site.app, queue)
    letter = next(letters.find(Selection(ids=frozenset({task_id}))), None)
    if letter is None:
        raise NotFound(f"queue {queue} has no dead letter {task_id}; it may have been replayed")
    found = arguments_of(site.app, letter.message, letter.problem)
    texts = []
    for value in (found.args, found.kwargs):
        try:
            text = json.dumps(value if not isinstance(value, tuple) else list(value), indent=2)
        except (TypeError, ValueError, RecursionError):
            raise ConfigurationError(
                "its arguments have no form in JSON, so this page cannot edit them"
            ) from None
        if found.problem or found.secret or mask(text) != text:
            raise ConfigurationError(
                found.problem or "its arguments have a secret, which this page does not show"
            )
        texts.append(escape(text))
    address = {"queue": queue, "id": task_id}
    values = {"letter": letter, "args": texts[0], "kwargs": texts[1], "address": address}
    return 200, Shown("edit", f"Edit {task_id}", {**values, "kind": kind})
