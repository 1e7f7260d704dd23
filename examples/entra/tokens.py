"""A token service for this machine: what Entra ID gives to programs, for `aztask emulator`.

Usage: python tokens.py FOLDER

It answers as three parts of Entra ID do: the endpoint of managed identities in Container Apps and
App Service, and the token endpoint for workload identity and for client secrets. Every client id is
an identity, whose ``oid`` is the client id itself. It is for tests and for learning: every
program of this machine that can read FOLDER gets a token.

FOLDER gets:

* ``aztask-emulator-cert.pem`` and its key, also for ``aztask emulator --certificate-dir FOLDER``
* ``keys.json``, for ``aztask emulator --entra-keys``
* ``managed.env``, ``workload.env`` and ``secret.env``: the environment of a program, to be sourced
  after ``AZURE_CLIENT_ID`` is set
"""

import datetime
import ipaddress
import json
import secrets
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

TENANT = "11111111-2222-4333-8444-555555555555"
SECONDS = 3600


def certificate_of(key: rsa.RSAPrivateKey) -> x509.Certificate:
    """A certificate for this machine, which clients must trust."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens of this machine")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )


class Tokens(BaseHTTPRequestHandler):
    """Answers GET for managed identities and about the tenant, and POST for applications."""

    key: rsa.RSAPrivateKey
    secret = secrets.token_urlsafe(16)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path == f"/{TENANT}/v2.0/.well-known/openid-configuration":
            address = f"https://{self.headers['Host']}/{TENANT}"
            names = {"authorization": "authorize", "token": "token"}
            found = {
                f"{name}_endpoint": f"{address}/oauth2/v2.0/{each}" for name, each in names.items()
            }
            self.answer(200, {**found, "issuer": f"{address}/v2.0"})
        elif self.headers.get("X-IDENTITY-HEADER") != self.secret:
            self.answer(401, {"error": "unauthorized_client"})
        else:
            client = query.get("client_id", ["default"])[0]
            self.answer(200, self.token(client, query["resource"][0]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body).items()}
        if self.secret not in (form.get("client_secret"), form.get("client_assertion")):
            text = "AADSTS7000215: Invalid client secret or assertion"
            self.answer(400, {"error": "invalid_client", "error_description": text})
        else:
            scope = form["scope"].split()[0].removesuffix("/.default")
            self.answer(200, self.token(form["client_id"], scope))

    def token(self, client: str, resource: str) -> dict[str, object]:
        now = int(time.time())
        claims = {"aud": resource, "oid": client, "appid": client}
        claims.update(iat=now, nbf=now, exp=now + SECONDS, iss=f"https://localhost/{TENANT}/")
        signed = jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": "local"})
        found = {"access_token": signed, "token_type": "Bearer", "resource": resource}
        return {**found, "expires_in": SECONDS, "expires_on": now + SECONDS}

    def answer(self, status: int, found: dict[str, object]) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


def write_environments(folder: Path, address: str) -> None:
    """What each kind of program finds in its environment."""
    certificate, file = folder / "aztask-emulator-cert.pem", folder / "federated-token"
    file.write_text(Tokens.secret)
    trusted = {"REQUESTS_CA_BUNDLE": certificate}
    application = {"AZURE_AUTHORITY_HOST": address, "AZURE_TENANT_ID": TENANT}
    endpoint = {"IDENTITY_ENDPOINT": f"{address}/msi/token", "IDENTITY_HEADER": Tokens.secret}
    environments = {
        "managed": endpoint,
        "workload": {**application, "AZURE_FEDERATED_TOKEN_FILE": file},
        "secret": {**application, "AZURE_CLIENT_SECRET": Tokens.secret},
    }
    for name, found in environments.items():
        lines = [f"export {key}='{value}'\n" for key, value in {**trusted, **found}.items()]
        (folder / f"{name}.env").write_text("".join(lines))


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    Tokens.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = Tokens.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pair = folder / "aztask-emulator-cert.pem", folder / "aztask-emulator-key.pem"
    pair[0].write_bytes(certificate_of(Tokens.key).public_bytes(serialization.Encoding.PEM))
    pair[1].touch(mode=0o600)
    pair[1].write_bytes(private)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(Tokens.key.public_key()))
    (folder / "keys.json").write_text(json.dumps({"keys": [{**public, "kid": "local"}]}))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    address = f"https://localhost:{server.server_address[1]}"
    write_environments(folder, address)
    print(f"tokens at {address}; stop with Ctrl-C", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
