"""Shared access signatures and what they cover."""

from __future__ import annotations

from urllib.parse import quote_plus

import pytest

from aztask.emulator.amqp import AmqpError
from aztask.emulator.broker.access import (
    Access,
    Right,
    Rule,
    TokenClaim,
    TokenClaims,
    resource_path,
    sign,
)
from aztask.emulator.broker.entities import parse_address

NOW = 1000.0


def token(resource="sb://host/queue", expiry="2000", key="key"):
    quoted = quote_plus(resource)
    signature = quote_plus(sign(key, f"{quoted}\n{expiry}"))
    return f"SharedAccessSignature sr={quoted}&sig={signature}&se={expiry}&skn=name"


@pytest.fixture
def access():
    return Access("key", lambda: NOW)


def test_a_valid_token(access):
    claim = access.claim(token(), "type", "sb://other-name:5672/queue")
    assert claim == TokenClaim("queue", 2000.0)


@pytest.mark.parametrize(
    "text",
    [
        token(key="wrong"),
        token(expiry="999"),
        token(expiry="nan"),
        token(resource="sb://host/other"),
        token().replace("se=2000", "se=3000"),
        token().replace("sig=", "gis="),
        "SharedAccessSignature ",
        "eyJ.jwt.token",
        "",
    ],
)
def test_invalid_tokens(access, text):
    with pytest.raises(AmqpError) as caught:
        access.claim(text, "jwt", "sb://host/queue")
    assert caught.value.condition == "amqp:unauthorized-access"


def test_without_a_key_everything_is_allowed():
    access = Access(None, lambda: NOW)
    assert access.claim("anything", "jwt", "x").covers("any/thing")
    assert access.password("a", "b")
    claims = TokenClaims(access, lambda: NOW)
    claims.check("anything")


@pytest.mark.parametrize(
    ("claim", "path", "covered"),
    [
        ("", "anything", True),
        ("queue", "queue", True),
        ("queue", "Queue/Subscriptions/s", True),
        ("queue", "queue2", False),
        ("queue/deeper", "queue", False),
    ],
)
def test_claims_cover_paths(claim, path, covered):
    assert TokenClaim(claim, 1.0).covers(path) is covered


def test_claims_of_a_connection_expire_and_are_replaced(access):
    clock = [NOW]
    claims = TokenClaims(access, lambda: clock[0])
    with pytest.raises(AmqpError):
        claims.check("queue")
    claims.add("a", TokenClaim("queue", 1500.0))
    claims.check("queue")
    clock[0] = 1500.0
    with pytest.raises(AmqpError):
        claims.check("queue")
    claims.add("a", TokenClaim("queue", 1600.0))
    claims.check("queue")
    assert claims.expiry("other") == 0.0
    claims.trusted = True
    claims.check("other")


def test_a_key_with_fewer_permissions(access):
    access = Access("key", lambda: NOW, {"name": Rule("small", frozenset({Right.LISTEN}))})
    claim = access.claim(token(key="small"), "type", "sb://host/queue")
    assert claim.rights == {Right.LISTEN}
    claims = TokenClaims(access, lambda: NOW)
    claims.add("a", claim)
    claims.check("queue")
    claims.check("queue", Right.LISTEN)
    with pytest.raises(AmqpError, match="'Send' claim is required"):
        claims.check("queue", Right.SEND)
    with pytest.raises(AmqpError, match="'Manage' claim is required"):
        access.bearer(token(key="small"), "queue")
    with pytest.raises(AmqpError, match="does not match"):
        access.claim(token(), "type", "sb://host/queue")
    assert "small" not in repr(Rule("small"))


def test_a_token_for_the_dead_letters_alone_covers_them():
    claim = TokenClaim(resource_path("sb://host/queue/$DeadLetterQueue"), 1.0)
    assert claim.covers(parse_address("queue/$DeadLetterQueue/$management").claimed)
    assert not claim.covers(parse_address("queue").claimed)
    assert (
        parse_address("queue/$Transfer/$DeadLetterQueue").claimed
        == "queue/$transfer/$deadletterqueue"
    )


def test_resource_paths():
    assert resource_path("sb://Host:5672/Queue/%24x/") == "queue/$x"
    assert resource_path("https://host") == ""
