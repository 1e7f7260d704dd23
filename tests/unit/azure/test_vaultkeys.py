"""Keys that Azure Key Vault wraps: the client of its SDK, against its HTTP interface."""

from __future__ import annotations

import json
import logging
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from aztask import App
from aztask.azure.vaultkeys import PAUSE, VaultKey, new_key
from aztask.emulator.emulator import server_context
from aztask.errors import BrokerUnavailable, ConfigurationError, KeyMissing
from aztask.message.encryption import NO_CIPHER, Cipher, Locked
from aztask.support import clock
from aztask.support.clock import Clock

PLAIN = b"a-key-of-before-with-enough-bytes-in-it-01"
SIGNING = "a-signing-key-that-is-long-enough-0123456789"
OAEP = padding.OAEP(padding.MGF1(SHA256()), SHA256(), None)
SECRET = "4111-1111-1111-1111"


def coded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def number(value: int) -> str:
    return coded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


@dataclass
class Vault:
    """One vault with one key. versions: the last is the newest. answer: of each request, if set."""

    port: int = 0
    versions: dict[str, rsa.RSAPrivateKey] = field(default_factory=dict)
    disabled: set[str] = field(default_factory=set)
    answer: tuple[int, dict[str, Any]] | None = None
    may_get: bool = True
    asked: list[str] = field(default_factory=list)

    @property
    def key_id(self) -> str:
        return f"https://127.0.0.1:{self.port}/keys/shop"

    def rotate(self) -> str:
        version = f"{len(self.versions) + 1:032x}"
        self.versions[version] = rsa.generate_private_key(65537, 2048)
        return version

    def answered(  # noqa: PLR0911
        self, method: str, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        parts = path.partition("?")[0].strip("/").split("/")[2:]
        operation = parts.pop() if method == "POST" else "get"
        version = parts[0] if parts and parts[0] else list(self.versions)[-1]
        self.asked.append(operation)
        if self.answer is not None:
            return self.answer
        if version not in self.versions:
            return 404, {"error": {"code": "KeyNotFound", "message": "A key was not found"}}
        if version in self.disabled:
            inner = {"code": "KeyDisabled"}
            text = f"Operation {operation} is not allowed on a disabled key."
            return 403, {"error": {"code": "Forbidden", "message": text, "innererror": inner}}
        if operation == "get" and not self.may_get:
            inner = {"code": "ForbiddenByRbac"}
            text = "Caller is not authorized.\r\nCaller: appid=1;oid=2"
            return 403, {"error": {"code": "Forbidden", "message": text, "innererror": inner}}
        key, kid = self.versions[version], f"{self.key_id}/{version}"
        if operation == "get":
            numbers = key.public_key().public_numbers()
            jwk = {"kid": kid, "kty": "RSA", "n": number(numbers.n), "e": number(numbers.e)}
            return 200, {"key": jwk, "attributes": {"enabled": True}}
        assert body["alg"] == "RSA-OAEP-256"
        if operation == "wrapkey":
            made = key.public_key().encrypt(decoded(body["value"]), OAEP)
            return 200, {"kid": kid, "value": coded(made)}
        try:
            return 200, {"kid": kid, "value": coded(key.decrypt(decoded(body["value"]), OAEP))}
        except ValueError:
            return 400, {"error": {"code": "BadParameter", "message": "It is incorrect."}}


def handler_of(vault: Vault) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization") != "Bearer the-token":
                # a resource whose domain the host ends with, as vault.azure.net has it
                where = f'resource="https://0.0.1:{vault.port}"'
                challenge = f'Bearer authorization="https://login.example/tenant", {where}'
                self._say(401, {}, challenge)
                return
            self._say(*vault.answered(self.command, self.path, json.loads(data or b"{}")))

        def _say(self, status: int, body: dict[str, Any], challenge: str = "") -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if challenge:
                self.send_header("WWW-Authenticate", challenge)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    return Handler


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    made = Vault()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(made))
    made.port = server.server_address[1]
    context, certificate = server_context(tmp_path / "tls", "127.0.0.1")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.rotate()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Credential:
    """The token that the vault takes."""

    def get_token(self, *scopes: str, **options: object) -> AccessToken:
        return AccessToken("the-token", int(clock.wall()) + 3600)


CREDENTIAL = Credential()


def cipher_of(*texts: str, encrypt: bool = True) -> Cipher:
    return Cipher([VaultKey(text, CREDENTIAL) for text in texts], encrypt=encrypt)


def test_a_new_key_is_wrapped_and_every_program_with_it_unwraps_the_same(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL)
    (version,) = vault.versions
    assert text.startswith(f"{vault.key_id}/{version}#")
    one, two = VaultKey(text, CREDENTIAL), VaultKey(text, CREDENTIAL)
    assert one.unwrapped() == two.unwrapped()
    assert len(one.unwrapped()) == 32
    assert new_key(vault.key_id, CREDENTIAL) != text


def test_the_vault_is_asked_once_and_when_the_first_piece_needs_it(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL)
    vault.asked.clear()
    cipher = cipher_of(text)
    assert cipher
    assert vault.asked == []
    pieces = [cipher.encrypt(b"secret", "x") for _ in range(100)]
    assert {cipher.decrypt(piece, "x") for piece in pieces} == {b"secret"}
    assert vault.asked == ["get", "unwrapkey"]


def test_a_program_may_be_forbidden_to_get_the_key(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL)
    vault.may_get = False
    assert len(VaultKey(text, CREDENTIAL).unwrapped()) == 32
    with pytest.raises(ConfigurationError, match="keys/NAME/VERSION"):
        new_key(vault.key_id, CREDENTIAL)  # without a version the text could not be unwrapped


def test_a_vault_that_rotates_its_key_unwraps_what_the_version_before_wrapped(
    vault: Vault,
) -> None:
    old = new_key(vault.key_id, CREDENTIAL)
    piece = cipher_of(old).encrypt(b"secret", "x")
    vault.rotate()
    new = new_key(vault.key_id, CREDENTIAL)
    assert new.partition("#")[0] != old.partition("#")[0]
    rotated = cipher_of(new, old)
    assert rotated.decrypt(piece, "x") == b"secret"
    assert cipher_of(new).decrypt(rotated.encrypt(b"secret", "x"), "x") == b"secret"


def test_plain_and_wrapped_keys_are_rotated_into_each_other(vault: Vault) -> None:
    before = Cipher([PLAIN], encrypt=True).encrypt(b"secret", "x")
    wrapped = VaultKey(new_key(vault.key_id, CREDENTIAL), CREDENTIAL)
    vault.asked.clear()
    added = Cipher([PLAIN, wrapped], encrypt=True)
    assert added.decrypt(before, "x") == b"secret"
    moved = Cipher([wrapped, PLAIN], encrypt=True)
    assert moved.decrypt(before, "x") == b"secret"
    after = moved.encrypt(b"secret", "x")
    assert added.decrypt(after, "x") == b"secret"
    assert [name in after.hex() for name in moved.names()] == [True, False]
    with pytest.raises(KeyMissing, match="has other keys"):
        Cipher([PLAIN]).decrypt(after, "x")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((503, {}), r"cannot be reached \(\w+: answers 503\)"),
        ((429, {"error": {"code": "Throttled"}}), r"cannot be reached \(\w+: answers 429\)"),
        ((403, {"error": {"code": "Forbidden"}}), "refused .403 Forbidden.: give the program's id"),
        ((400, {"error": {"code": "BadParameter"}}), "400 BadParameter.: is the text after # comp"),
        ((404, {"error": {"code": "KeyNotFound"}}), "404 KeyNotFound.: the key or its version was"),
        ((418, {}), "refused .418 without a code."),
    ],
)
def test_a_failure_is_one_line_without_a_secret(
    vault: Vault, answer: tuple[int, dict[str, Any]], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = new_key(vault.key_id, CREDENTIAL)
    vault.answer = answer
    with caplog.at_level(logging.DEBUG), pytest.raises(BrokerUnavailable, match=text) as raised:
        VaultKey(wrapped, CREDENTIAL).unwrapped()
    (version,) = vault.versions
    assert f"the key shop/{version} of 127.0.0.1:{vault.port}" in str(raised.value)
    for shown in (str(raised.value), caplog.text):
        assert "the-token" not in shown
        assert wrapped.partition("#")[2] not in shown
    assert str(raised.value).isprintable()
    if answer[0] != 418:
        with pytest.raises(BrokerUnavailable):
            new_key(vault.key_id, CREDENTIAL)


def test_a_disabled_version_says_so(vault: Vault) -> None:
    wrapped = new_key(vault.key_id, CREDENTIAL)
    vault.disabled |= set(vault.versions)
    with pytest.raises(BrokerUnavailable, match=r"is disabled \(403\): enable this version again"):
        VaultKey(wrapped, CREDENTIAL).unwrapped()


def test_while_the_vault_is_away_pieces_wait_and_a_running_program_goes_on(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL)
    running = cipher_of(text)
    piece = running.encrypt(b"secret", "x")
    vault.answer = (503, {})
    now = [1000.0]
    with clock.replaced(Clock(monotonic=lambda: now[0])):
        starting = cipher_of(text)
        with pytest.raises(BrokerUnavailable, match="nothing can be encrypted: the key shop/"):
            starting.encrypt(b"secret", "x")
        with pytest.raises(Locked, match=r"has not all of its keys yet: the key shop/.*503"):
            starting.decrypt(piece, "x")
        with pytest.raises(BrokerUnavailable, match="an encryption key is missing: the key shop/"):
            starting.unlock()
        assert running.decrypt(running.encrypt(b"other", "x"), "x") == b"other"
        vault.asked.clear()
        assert starting.missing(piece)
        assert vault.asked == [], "it was asked a moment ago"
        vault.answer = None
        now[0] += PAUSE
        assert starting.missing(piece) == ""
        assert starting.decrypt(piece, "x") == b"secret"
        starting.unlock()


def test_nothing_is_encrypted_with_the_second_key_while_the_first_is_missing(vault: Vault) -> None:
    """Or readers that have the first alone could not read it."""
    first = VaultKey(new_key(vault.key_id, CREDENTIAL), CREDENTIAL)
    vault.answer = (503, {})
    cipher = Cipher([first, PLAIN], encrypt=True)
    with pytest.raises(BrokerUnavailable, match="nothing can be encrypted"):
        cipher.encrypt(b"secret", "x")
    before = Cipher([PLAIN], encrypt=True).encrypt(b"secret", "x")
    assert cipher.decrypt(before, "x") == b"secret"


def test_a_vault_that_refuses_connections_is_told(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL).replace(f":{vault.port}/", ":1/")
    with pytest.raises(BrokerUnavailable, match=r"cannot be reached \(ServiceRequestError"):
        VaultKey(text, CREDENTIAL).unwrapped()


def test_a_host_that_answers_for_another_domain_gets_no_token(vault: Vault) -> None:
    text = new_key(vault.key_id, CREDENTIAL).replace("127.0.0.1", "localhost")
    vault.asked.clear()
    with pytest.raises(BrokerUnavailable, match="another domain, so it is no vault"):
        VaultKey(text, CREDENTIAL).unwrapped()
    assert vault.asked == []


def test_a_data_key_that_is_too_short_is_refused(vault: Vault) -> None:
    (version,) = vault.versions
    wrapped = vault.versions[version].public_key().encrypt(b"short", OAEP)
    key = VaultKey(f"{vault.key_id}/{version}#{coded(wrapped)}", CREDENTIAL)
    with pytest.raises(ConfigurationError, match="unwraps 5 bytes, not 32"):
        key.unwrapped()


@pytest.mark.parametrize(
    "text",
    [
        "https://shop.vault.azure.net/keys/shop/1f",
        "https://shop.vault.azure.net/keys/shop#AAAA",
        "https://shop.vault.azure.net/secrets/shop/1f#AAAA",
        "https://shop.vault.azure.net/keys/shop/1f#A",
        "https://user@shop.vault.azure.net/keys/shop/1f#AAAA",
    ],
)
def test_a_wrong_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="an encryption key of a vault is https://VAULT"):
        App("shop", broker="local://:memory:", encryption_keys=[text])


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The endpoint where a machine of Azure gets the tokens of its managed identity."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["X-IDENTITY-HEADER"] == "a-header"
            body = {"access_token": "the-token", "expires_on": str(int(clock.wall()) + 3600)}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}/token")
    monkeypatch.setenv("IDENTITY_HEADER", "a-header")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_app_asks_with_the_identity_of_its_machine(vault: Vault, identity: None) -> None:
    text = new_key(vault.key_id)
    app = App(
        "shop",
        broker="local://:memory:",
        encryption_keys=[text],
        encrypt=True,
        signing_keys=[SIGNING],
        id_key=SIGNING,
    )

    @app.task
    def charge(card: str) -> None: ...

    charge.delay(SECRET)
    (found,) = app.broker.peek("default")
    assert SECRET.encode() not in found.envelope.body
    message = app.codec.from_envelope(found.envelope, "default")
    assert app.codec.decode_arguments(message) == ((SECRET,), {})
    assert NO_CIPHER.missing(found.envelope.body)
    assert text not in repr(app.settings)
