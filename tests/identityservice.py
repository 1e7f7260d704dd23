"""The parts of Entra ID that programs use: tokens for secrets, files of clusters, and machines.

The token endpoint of `tests.tokenservice` also answers the client credentials flow here, and beside
it are the managed identity endpoints of App Service and Container Apps, and of virtual machines.
"""

import json
import time
from urllib.parse import parse_qs, urlsplit

import jwt
from tokenservice import CLIENT, KID, SECRET, TENANT, TokenService, answer, refuse

PRINCIPAL = "99999999-8888-4777-8666-555555555555"
HEADER = "made-up-identity-header"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
APP_SERVICE = "/msi/token"
MACHINE = "/metadata/identity/oauth2/token"


class IdentityService(TokenService):
    """Stop it with `close`.

    * `life`: seconds that a token is valid. `ahead`: how far its clock is ahead.
    * `federated`: what the cluster's token file has to hold.
    * `away`: answers all requests for tokens with this status and text.
    * `given`: the way in which each token was asked for.
    * `applications`: the identity of each application, by its client id.
    """

    def __init__(self, folder, key):
        self.life, self.ahead, self.federated, self.away, self.given = 3600, 0, None, None, []
        self.applications = {CLIENT: PRINCIPAL}
        super().__init__(folder, key)

    def get(self, handler):
        parts = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == APP_SERVICE:
            allowed = handler.headers.get("X-IDENTITY-HEADER") == HEADER
            self._machine(handler, "app-service", query["resource"], allowed)
        elif parts.path == MACHINE:
            allowed = handler.headers.get("Metadata") == "true"
            self._machine(handler, "machine", query["resource"], allowed)
        else:
            super().get(handler)

    def _machine(self, handler, way, resource, allowed):
        if self.away:
            answer(handler, *self.away)
        elif not allowed:
            answer(handler, 401, json.dumps({"error": "unauthorized_client"}))
        else:
            answer(handler, 200, json.dumps(self._granted(way, resource)))

    def post(self, handler):
        length = int(handler.headers["Content-Length"])
        form = {n: v[0] for n, v in parse_qs(handler.rfile.read(length).decode()).items()}
        scope = form.get("scope", "").split()[0].removesuffix("/.default")
        if self.away:
            answer(handler, *self.away)
        elif (
            form.get("grant_type") != "client_credentials"
            or (client := form.get("client_id")) not in self.applications
        ):
            refuse(handler, "unauthorized_client", "AADSTS700016: no such application")
        elif form.get("client_secret") == SECRET:
            answer(handler, 200, json.dumps(self._granted("secret", scope, client)))
        elif (
            self.federated is not None
            and form.get("client_assertion") == self.federated
            and form.get("client_assertion_type") == ASSERTION
        ):
            answer(handler, 200, json.dumps(self._granted("workload", scope, client)))
        else:
            refuse(handler, "invalid_client", "AADSTS7000215: Invalid client secret provided")

    def _granted(self, way, resource, client=CLIENT):
        self.given.append(way)
        now = int(time.time() + self.ahead)
        claims = {
            "aud": resource,
            "iss": f"https://sts.windows.net/{TENANT}/",
            "oid": self.applications[client],
            "appid": client,
            "iat": now,
            "nbf": now,
            "exp": now + self.life,
            "jti": str(len(self.given)),
        }
        token = jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": self.kid})
        self.tokens.append(token)
        found = {"access_token": token, "token_type": "Bearer", "resource": resource}
        return {**found, "expires_in": self.life, "expires_on": now + self.life}

    def jwks(self):
        """The public keys, as a JWKS document has them."""
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.published.public_key()))
        return [{**public, "kid": KID}]
