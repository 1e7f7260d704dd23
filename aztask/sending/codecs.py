"""The codec that an app's settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from aztask.config import Settings
from aztask.message.codec import Codec
from aztask.message.signatures import SignatureRules


def codec_for(settings: Settings, max_age: Callable[[str], float]) -> Codec:
    """Make the codec. max_age: queue -> the age of signed messages that it accepts, in seconds."""
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
    )
