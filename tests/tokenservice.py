"""A token service like Entra ID's, over HTTPS on this machine: discovery, authorize, token, keys.

It is strict where the service is: a code counts once, for its redirect address, its client's secret
and its PKCE verifier. `claims` and the other attributes make it answer wrongly.
"""

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from aztask.emulator.emulator import server_context

TENANT = "11111111-2222-4333-8444-555555555555"
CLIENT = "66666666-7777-4888-8999-aaaaaaaaaaaa"
SECRET = "made-up~client-secret-0123456789"
KID = "key-1"


def new_key():
    """A key that signs tokens."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class TokenService:
    """One tenant's service. Stop it with `close`.

    * `claims`: what the next ID tokens say otherwise; None leaves a claim out.
    * `key`, `kid`: what they are signed with, and which key they name.
    * `refuses`: what authorize or token answers instead: a status and a text.
    * `served`: the paths that were asked for. `tokens`: what was given out.
    """

    def __init__(self, folder, key):
        self.published, self.key, self.kid = key, key, KID
        self.claims, self.refuses = {}, {}
        self.served, self.tokens, self.codes, self.asked = [], [], {}, []
        context, self.certificate = server_context(folder, "127.0.0.1")
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                service.get(self)

            def do_POST(self):
                service.post(self)

            def log_message(self, *given):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.authority = f"https://127.0.0.1:{self._server.server_address[1]}"
        self.issuer = f"{self.authority}/{TENANT}/v2.0"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        """Stop; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    # -- the endpoints -----------------------------------------------------------------------

    def get(self, handler):
        parts = urlsplit(handler.path)
        self.served.append(parts.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        base = f"{self.authority}/{TENANT}"
        name = parts.path.removeprefix(f"/{TENANT}")
        if name in self.refuses:
            answer(handler, *self.refuses[name])
        elif name == "/v2.0/.well-known/openid-configuration":
            found = {
                "issuer": self.issuer,
                "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
                "token_endpoint": f"{base}/oauth2/v2.0/token",
                "jwks_uri": f"{base}/discovery/v2.0/keys",
            }
            answer(handler, 200, json.dumps(found))
        elif name == "/discovery/v2.0/keys":
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.published.public_key()))
            keys = [{**public, "kid": KID, "use": "sig", "alg": "RS256"}]
            answer(handler, 200, json.dumps({"keys": keys}))
        elif name == "/oauth2/v2.0/authorize":
            self._authorize(handler, query)
        else:
            answer(handler, 404, "{}")

    def _authorize(self, handler, query):
        assert query["client_id"] == CLIENT and query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"] and "offline_access" not in query["scope"]
        self.asked.append(query)
        code = secrets.token_urlsafe(24)
        self.codes[code] = query
        given = urlencode({"code": code, "state": query["state"]})
        handler.send_response(302)
        handler.send_header("Location", f"{query['redirect_uri']}?{given}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def post(self, handler):
        self.served.append(handler.path)
        body = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body).items()}
        if "/token" in self.refuses:
            answer(handler, *self.refuses["/token"])
            return
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        asked = self.codes.pop(form.get("code"), None)  # whatever happens: a code counts once
        if form.get("client_id") != CLIENT or form.get("client_secret") != SECRET:
            refuse(handler, "invalid_client", "AADSTS7000215: Invalid client secret provided")
        elif asked is None:
            refuse(handler, "invalid_grant", "AADSTS54005: the code was already redeemed")
        elif asked["redirect_uri"] != form["redirect_uri"]:
            refuse(handler, "invalid_grant", "AADSTS50011: another redirect address")
        elif asked["code_challenge"] != challenge:
            refuse(handler, "invalid_grant", "AADSTS501481: the verifier does not match")
        else:
            token = self._token(asked["nonce"])
            self.tokens += [form["code"], form["code_verifier"], token]
            found = {"token_type": "Bearer", "expires_in": 3600, "id_token": token}
            answer(handler, 200, json.dumps({**found, "access_token": secrets.token_urlsafe(32)}))

    def _token(self, nonce):
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "tid": TENANT,
            "sub": "the-subject",
            "nonce": nonce,
            "iat": now,
            "exp": now + 3600,
            "preferred_username": "ann@example.com",
            "roles": ["act"],
        }
        claims |= self.claims
        given = {name: value for name, value in claims.items() if value is not None}
        if self.key is None:
            return jwt.encode(given, None, algorithm="none", headers={"kid": self.kid})
        return jwt.encode(given, self.key, algorithm="RS256", headers={"kid": self.kid})


def answer(handler, status, text):
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def refuse(handler, error, text):
    answer(handler, 400, json.dumps({"error": error, "error_description": text}))
