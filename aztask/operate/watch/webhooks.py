"""Messages to webhooks: Teams, Slack, and plain JSON; and the heartbeat.

Rules
1. A text of a task, a queue or an error is shown as text in every form: in Slack as ``plain_text``,
   in Teams as a ``TextRun``, which both services show as it is. Only links of our own are links.
2. The address is in no error: only the webhook's name is, and what the server answered.
3. A redirect is not followed: it would take the message to an address that no one has chosen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from aztask.operate.watch.rules import Webhook
from aztask.support.display import Secret, safe_str
from aztask.version import __version__

TIMEOUT: Final = 10.0
"""Seconds that a server may take for each step of an answer."""
SHOWN: Final = 20
"""Lines of one message. JSON has all of them."""
LONGEST_LINE: Final = 300
_LONGEST_TITLE: Final = 200
_READ: Final = 1_000


@dataclass(frozen=True, slots=True)
class NoticeLine:
    """One thing that began or ended.

    * `rule`, `when`: the rule's name and its kind. `since`: UTC epoch seconds.
    * `link`: the page that shows it; "" without the dashboard's address.
    """

    began: bool
    rule: str
    when: str
    text: str
    since: float
    link: str = ""

    def __str__(self) -> str:
        text = f"{'Began' if self.began else 'Ended'}: {self.rule}: {self.text}"
        return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 3]}..."


def title_of(app: str, lines: Sequence[NoticeLine]) -> str:
    """What a message is about, in a few words."""
    began = sum(each.began for each in lines)
    counts = [f"{began} began"] if began else []
    counts += [f"{len(lines) - began} ended"] if began < len(lines) else []
    return f"aztask, {app}: {', '.join(counts)}"[:_LONGEST_TITLE]


def body_of(form: str, app: str, lines: Sequence[NoticeLine]) -> bytes:
    """The message in the form of a webhook."""
    forms = {"slack": _slack, "teams": _teams, "json": _plain}
    return json.dumps(forms[form](app, lines)).encode()


def _more(lines: Sequence[NoticeLine]) -> list[str]:
    left = len(lines) - SHOWN
    return [f"and {left} more"] if left > 0 else []


def _plain(app: str, lines: Sequence[NoticeLine]) -> dict[str, Any]:
    notices = [
        {
            "state": "began" if each.began else "ended",
            "rule": each.rule,
            "when": each.when,
            "text": each.text,
            "since": datetime.fromtimestamp(each.since, UTC).isoformat(timespec="seconds"),
            "link": each.link or None,
        }
        for each in lines
    ]
    return {"source": "aztask", "app": app, "title": title_of(app, lines), "notices": notices}


def _slack(app: str, lines: Sequence[NoticeLine]) -> dict[str, Any]:
    title = title_of(app, lines)
    blocks = [_slack_text(title)]
    for each in lines[:SHOWN]:
        blocks.append(_slack_text(str(each)))
        if each.link:
            element = {"type": "mrkdwn", "text": f"<{_slack_plain(each.link)}|Open>"}
            blocks.append({"type": "context", "elements": [element]})
    blocks += [_slack_text(each) for each in _more(lines)]
    return {"text": _slack_plain(title), "mrkdwn": False, "blocks": blocks}


def _slack_text(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "plain_text", "text": text, "emoji": False}}


def _slack_plain(text: str) -> str:
    """A text in which Slack finds no mention and no link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(app: str, lines: Sequence[NoticeLine]) -> dict[str, Any]:
    body = [_teams_text(title_of(app, lines), weight="Bolder")]
    for each in lines[:SHOWN]:
        block = _teams_text(str(each), color="Attention" if each.began else "Good")
        if each.link:
            action = {"type": "Action.OpenUrl", "url": each.link}
            block["inlines"].append({"type": "TextRun", "text": " Open", "selectAction": action})
        body.append(block)
    body += [_teams_text(each) for each in _more(lines)]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _teams_text(text: str, **style: str) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text, **style}]}


# -- sending ---------------------------------------------------------------------------------


class _StayHere(HTTPRedirectHandler):
    """Makes a redirect an answer like any other."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        """Follow no redirect: its answer is the answer."""
        return


def post(webhook: Webhook, data: bytes) -> str:
    """Send a message; returns "" once the server has taken it, else what went wrong."""
    problem = _ask(webhook.url, data)
    return f"webhook {webhook.name}: {problem}" if problem else ""


def beat(url: Secret) -> str:
    """Ask for the heartbeat's address; returns "", else what went wrong."""
    problem = _ask(url, None)
    return f"the heartbeat's address: {problem}" if problem else ""


def _ask(url: Secret, data: bytes | None) -> str:
    headers = {"User-Agent": f"aztask/{__version__}"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    # Only https, or http on this machine: the file of rules was checked.
    request = Request(url.reveal(), data=data, headers=headers)  # noqa: S310
    try:
        with build_opener(_StayHere).open(request, timeout=TIMEOUT) as answer:
            answer.read(_READ)
    except HTTPError as error:
        with error:
            return f"the server answered {error.code}"
    except (OSError, HTTPException) as error:
        return f"no answer: {safe_str(getattr(error, 'reason', error))}"
    return ""
