"""The codec of an app, from its settings."""

from __future__ import annotations

from collections.abc import Callable

from aztask.config import Settings
from aztask.message.codec import Codec
from aztask.message.payload import StoredValue
from aztask.message.signatures import SignatureRules


def codec_of(
    settings: Settings,
    max_age: Callable[[str], float],
    load: Callable[[StoredValue], bytes] | None = None,
) -> Codec:
    """The codec for these settings.

    * `max_age`: the longest age, in seconds, of signatures on the queue that is named.
    * `load`: fetches a payload; None if the app stores none.
    """
    return Codec(
        serializer=settings.serializer,
        accept=settings.accept,
        signing_keys=[key.reveal().encode() for key in settings.signing_keys],
        signatures=SignatureRules(
            old=settings.old_signatures,
            max_age=max_age,
            clock_skew=settings.signature_clock_skew_seconds,
        ),
        id_key=settings.id_key.reveal().encode() if settings.id_key else None,
        argsrepr=settings.argsrepr,
        load=load,
    )
