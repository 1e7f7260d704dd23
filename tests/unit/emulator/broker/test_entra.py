"""Tokens of Entra ID at the emulator: which count, and that nothing else gets through."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from aztask.emulator.amqp import AmqpError
from aztask.emulator.broker.access import Access, TokenClaims, sign
from aztask.emulator.broker.entra import EntraTokens, Right, TokenRefused

NOW = 1_800_000_000.0
KEY, OTHER = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
CLAIMS = {
    "aud": "https://servicebus.azure.net/",
    "oid": "the-worker",
    "nbf": NOW - 60,
    "exp": NOW + 3600,
}


def public(key: Any, kid: str) -> dict[str, Any]:
    return {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": kid}


def token(key: Any = KEY, kid: str = "one", algorithm: str = "RS256", **claims: Any) -> str:
    given = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(given, key, algorithm=algorithm, headers={"kid": kid})


@pytest.fixture
def tokens() -> EntraTokens:
    grants = {"the-worker": frozenset({Right.SEND}), "the-app": frozenset({Right.LISTEN})}
    return EntraTokens([public(OTHER, "zero"), public(KEY, "one")], grants)


def test_a_token_counts_until_it_expires_with_the_permissions_of_its_identity(
    tokens: EntraTokens,
) -> None:
    assert tokens.verified(token(), NOW) == (NOW + 3600, {Right.SEND})
    assert tokens.verified(token(oid=None, appid="the-app"), NOW)[1] == {Right.LISTEN}
    assert tokens.verified(token(OTHER, "zero"), NOW)[1] == {Right.SEND}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: token(exp=NOW), "expired 0 s ago"),
        (lambda: token(exp=None), "lacks exp"),
        (lambda: token(exp="soon"), "lacks exp"),
        (lambda: token(exp="nan"), "expired nan s ago"),
        (lambda: token(nbf=NOW + 90), "is valid in 90 s"),
        (lambda: token(nbf="nan"), "is valid in nan s"),
        (lambda: token(aud="https://storage.azure.com"), "is for 'https://storage.azure.com'"),
        (lambda: token(aud=None), "is for ''"),
        (lambda: token(oid="a-stranger"), "'a-stranger' has no role here"),
        (lambda: token(oid=None), "'' has no role here"),
        (lambda: token(oid=["the-worker"]), "has no role here"),
        (lambda: token(OTHER), "signature does not match"),
        (lambda: token(kid="two"), "a key that is not known"),
        (lambda: token(None, algorithm="none"), "signed with 'none'"),
        (lambda: token("x" * 64, algorithm="HS256"), "signed with 'HS256'"),
        (lambda: token(algorithm="RS512"), "signed with 'RS512'"),
        (lambda: "", "no JSON Web Token"),
        (lambda: "a.b.c", "no JSON Web Token"),
        (lambda: "é.é.é", "no JSON Web Token"),
        (lambda: part([]) + "." + part([]) + ".", "no JSON Web Token"),
        (lambda: raw("[" * 200_000) + "..", "no JSON Web Token"),
        (lambda: token().rpartition(".")[0] + ".", "signature does not match"),
        (lambda: changed(token(), oid="the-app"), "signature does not match"),
        (lambda: token()[:-8] + "AAAAAAAA", "signature does not match"),
        (lambda: signed_with(b"\xff" * 256), "signature does not match"),
    ],
)
def test_any_other_is_refused_with_the_reason(
    made: Callable[[], str], text: str, tokens: EntraTokens
) -> None:
    with pytest.raises(TokenRefused) as caught:
        tokens.verified(made(), NOW)
    assert text in str(caught.value)


def raw(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def part(value: Any) -> str:
    return raw(json.dumps(value))


def changed(given: str, **claims: Any) -> str:
    head, _, signature = given.split(".")
    return f"{head}.{part({**CLAIMS, **claims})}.{signature}"


def signed_with(signature: bytes) -> str:
    """A number above the modulus: RFC 8017 demands that it is refused."""
    text = base64.urlsafe_b64encode(signature).decode().rstrip("=")
    return f"{token().rpartition('.')[0]}.{text}"


# -- beside shared keys ----------------------------------------------------------------------------


def test_without_a_shared_key_only_tokens_count(tokens: EntraTokens) -> None:
    access = Access(None, lambda: NOW, entra=tokens)
    assert access.required
    assert access.claim(token(), "jwt", "sb://host/q").rights == {Right.SEND}
    assert not access.password("RootManageSharedAccessKey", "any")
    expiry = int(time.time() + 9e8)
    signed = sign("any", f"host\n{expiry}")
    with pytest.raises(AmqpError, match="shared access keys are off"):
        access.claim(f"SharedAccessSignature sr=host&sig={signed}&se={expiry}", "sas", "host")
    with pytest.raises(AmqpError, match="no valid token"):
        TokenClaims(access, lambda: NOW).check("q")


def test_both_count_where_both_are_given(tokens: EntraTokens) -> None:
    access = Access("main", lambda: NOW, entra=tokens)
    assert access.password("RootManageSharedAccessKey", "main")
    assert access.claim(token(), "jwt", "sb://host/q").rights == {Right.SEND}
    assert not access.password("RootManageSharedAccessKey", "any")


def test_a_grant_that_is_taken_away_counts_at_the_next_token() -> None:
    grants = {"the-worker": frozenset({Right.MANAGE})}
    access = Access(None, lambda: NOW, entra=EntraTokens([public(KEY, "one")], grants))
    access.bearer(f"Bearer {token()}", "q")
    grants["the-worker"] = frozenset({Right.SEND})
    with pytest.raises(AmqpError, match="'Manage' claim is required"):
        access.bearer(f"Bearer {token()}", "q")
    del grants["the-worker"]
    with pytest.raises(AmqpError, match="has no role here"):
        access.bearer(f"Bearer {token()}", "q")
    for header in (None, "", "Bearer ", token()[:20]):
        with pytest.raises(AmqpError):
            access.bearer(header, "q")
