"""SASL on the server's side (specification part 5.3): which mechanisms, and who is let in.

Rules
1. ANONYMOUS, EXTERNAL and MSSBCBS prove nothing here: their users show a token to ``$cbs`` later.
2. PLAIN is the shared access key's name and the key; right credentials need no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MECHANISMS = ["MSSBCBS", "PLAIN", "ANONYMOUS", "EXTERNAL"]
OK = 0
AUTHENTICATION_FAILED = 1

PlainCheck = Callable[[str, str], bool]
"""(user, password) -> whether they are right"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """code: of sasl-outcome. trusted: the connection needs no further token."""

    code: int
    trusted: bool


def judge(mechanism: str, response: bytes | None, plain: PlainCheck) -> Verdict:
    """What to answer to a sasl-init."""
    if mechanism == "PLAIN":
        parts = (response or b"").split(b"\x00")
        if len(parts) == 3 and plain(
            parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "replace")
        ):
            return Verdict(OK, True)
        return Verdict(AUTHENTICATION_FAILED, False)
    return Verdict(OK if mechanism in MECHANISMS else AUTHENTICATION_FAILED, False)
