"""Task ids from keys: the same row gets the same id in every run, on every machine.

The id is the UUID version 5 (RFC 9562) of the key's text, in a namespace derived from the
submission id. It does not depend on partition, row number or time, so a retried, speculative or
repeated Spark task sends the same ids again.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from datetime import date
from typing import Final

NAMESPACE: Final = uuid.UUID("0b6bd0a4-3c1f-5a52-8f7a-9d8d5a0f6a11")
"""The namespace of all submissions. It must never change, or reruns would get other ids."""

Key = str | int | date


def task_id(submission_id: str, key: Key) -> str:
    """The id of the task submitted for `key`, for example to look up its result.

    key: the value in the key column: text, an integer or a date.
    """
    return id_maker(submission_id)(key)


def id_maker(submission_id: str) -> Callable[[Key], str]:
    """A faster `task_id` for many keys of one submission."""
    begun = hashlib.sha1(uuid.uuid5(NAMESPACE, submission_id).bytes, usedforsecurity=False)

    def made(key: Key) -> str:
        digest = begun.copy()
        digest.update(str(key).encode())
        digits = digest.hexdigest()
        variant = "89ab"[int(digits[16], 16) & 3]
        return (
            f"{digits[:8]}-{digits[8:12]}-5{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"
        )

    return made
