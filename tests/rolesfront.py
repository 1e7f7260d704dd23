"""What Azure does in front of a storage account: who asks by a token of Entra ID needs a role.

Azurite knows no roles. This stands in front of its tables and blobs, over HTTPS: it verifies the
token, looks up which roles its identity has on the table or container that is asked for, and
refuses what none of them permits, with the code and the status of the service. The rest is passed
on under a signature. Requests with a key or a signature are passed on as they are, for Azurite to
judge.

The data actions of each role are those of Azure's documentation, "Azure built-in roles"; which
action a request needs is that of "Authorize access", for the operations that aztask uses.
"""

import http.client
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import jwt
from azure.core.credentials import AzureNamedKeyCredential
from azure.data.tables import (
    AccountSasPermissions,
    ResourceTypes,
    generate_account_sas,
)
from azure.storage import blob
from azurite import ACCOUNT, KEY

TABLE_READER = "76199698-9eea-4c19-bc75-cec21354c6b6"
TABLE_CONTRIBUTOR = "0a9a7e1f-b9d0-4cc4-a60d-0319b160aaa3"
BLOB_READER = "2a2b9908-6ea1-4ae2-8e65-a410df84e7d1"
BLOB_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
DATA_ACTIONS = {
    TABLE_READER: {"tables/entities/read"},
    TABLE_CONTRIBUTOR: {f"tables/entities/{each}" for each in ("read", "write", "delete")},
    BLOB_READER: {"blobs/read"},
    BLOB_CONTRIBUTOR: {f"blobs/{each}" for each in ("read", "write", "delete")},
}
METHODS = {
    **dict.fromkeys(("GET", "HEAD"), "read"),
    **dict.fromkeys(("POST", "PUT", "PATCH", "MERGE"), "write"),
    "DELETE": "delete",
}
KINDS = {"table": "tables/entities", "blob": "blobs"}
ENDS = ("authorization", "connection", "host", "transfer-encoding", "content-length")


class RolesFront:
    """One service of an account. Stop it with `close`.

    * `assigned`: the roles by identity and by the name of the table or container; a test may change
      it at any time.
    * `refused`: what was refused, as (identity, data action, name).
    """

    def __init__(self, azurite, identity, context, assigned):
        self.azurite, self.identity, self.assigned, self.refused = azurite, identity, assigned, []
        self._signature = _signature_of(azurite.service)
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __getattr__(self, name):
                if name.removeprefix("do_") not in METHODS:
                    raise AttributeError(name)
                return lambda: front.answer(self)

            def log_message(self, *given):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.endpoint = f"https://127.0.0.1:{self._server.server_address[1]}/{ACCOUNT}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = handler.path
        given = handler.headers.get("Authorization", "")
        if given.startswith("Bearer "):
            code = self._refusal(given.removeprefix("Bearer "), handler.command, path)
            if code is not None:
                _refuse(handler, self.azurite.service, *code)
                return
            path += ("&" if "?" in path else "?") + self._signature
        self._pass_on(handler, path, body, keep=not given.startswith("Bearer "))

    def _refusal(self, token, method, path):
        """The status and the code; None if a role permits it."""
        try:
            claims = jwt.decode(
                token,
                self.identity.published.public_key(),
                algorithms=["RS256"],
                audience="https://storage.azure.com",
            )
        except jwt.PyJWTError:
            return 401, "InvalidAuthenticationInfo"
        name = urlsplit(path).path.removeprefix(f"/{ACCOUNT}/").partition("/")[0].partition("(")[0]
        needed = f"{KINDS[self.azurite.service]}/{METHODS[method]}"
        roles = self.assigned.get((claims["oid"], name), ())
        if any(needed in DATA_ACTIONS[role] for role in roles):
            return None
        self.refused.append((claims["oid"], needed, name))
        return 403, "AuthorizationPermissionMismatch"

    def _pass_on(self, handler, path, body, *, keep):
        connection = http.client.HTTPConnection("127.0.0.1", self.azurite.port, timeout=30)
        headers = {
            name: value
            for name, value in handler.headers.items()
            if name.lower() not in ENDS or (keep and name.lower() == "authorization")
        }
        if body or handler.command in ("POST", "PUT", "PATCH", "MERGE"):
            headers["Content-Length"] = str(len(body))
        connection.request(handler.command, path, body or None, headers)
        found = connection.getresponse()
        data = found.read()
        connection.close()
        handler.send_response(found.status)
        for name, value in found.getheaders():
            if name.lower() not in ENDS:
                handler.send_header(name, value)
        if found.status not in (204, 304):
            length = (
                len(data) if handler.command != "HEAD" else found.getheader("Content-Length", "0")
            )
            handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(data)


def _signature_of(service):
    until = datetime.now(UTC) + timedelta(hours=2)
    if service == "table":
        return generate_account_sas(
            AzureNamedKeyCredential(ACCOUNT, KEY),
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions.from_string("rwdlacu"),
            until,
        )
    return blob.generate_account_sas(
        ACCOUNT,
        KEY,
        blob.ResourceTypes(service=True, container=True, object=True),
        blob.AccountSasPermissions.from_string("rwdlac"),
        until,
    )


def _refuse(handler, service, status, code):
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    kind = "application/xml"
    if service == "table":
        text = f'{{"odata.error":{{"code":"{code}","message":{{"value":"{code}"}}}}}}'
        kind = "application/json"
    data = b"" if handler.command == "HEAD" else text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("x-ms-error-code", code)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
