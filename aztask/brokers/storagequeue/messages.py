"""Put, receive, update and delete: the requests of which every message costs two or three.

The SDK's generated client spends three quarters of such a request's CPU time on what these do not
need: serializers for arguments of any kind, models of what nobody looks at, fourteen pipeline
policies [measured: 0.5 ms against 0.17 ms for a put, 3.4 ms against 0.6 ms for reading an answer
with 32 messages]. So they are composed here, by the service's REST reference ("Put Message", "Get
Messages", "Update Message", "Delete Message"), and run through a pipeline of the SDK's parts: its
credentials sign, its transport interface carries, its errors are raised. Everything else that is
asked of a queue goes through the SDK's client.

Rules
1. Nothing is sent twice here.
2. The service's verdict is told by the header ``x-ms-error-code``, as the module `errors` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    DecodeError,
    HttpResponseError,
    ServiceRequestError,
)
from azure.core.pipeline import Pipeline
from azure.core.pipeline.policies import (
    AzureSasCredentialPolicy,
    BearerTokenCredentialPolicy,
    SansIOHTTPPolicy,
)
from azure.core.pipeline.transport import HttpTransport
from azure.core.rest import HttpRequest, HttpResponse
from azure.storage.queue import QueueServiceClient

from aztask.azure.connection import Response
from aztask.azure.transport import LeanTransport
from aztask.version import __version__

TOKEN_SCOPE: Final = "https://storage.azure.com/.default"
"""What a token must be for (the service's documentation, "Authorize with Microsoft Entra ID")."""

_AGENT: Final = f"aztask/{__version__}"


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as the service hands it out.

    count: of its deliveries, with this one. put_at: wall-clock seconds, 0 where the answer does not
    say. token: the pop receipt.
    """

    position: str
    token: str
    count: int
    put_at: float
    text: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to be composed.

    text: the message's, where the request has one. late: asked when its turn comes, whether it is
    too late for it.
    """

    method: str
    url: str
    text: str | None = None
    late: Callable[[], bool] | None = None


class NullTransport(HttpTransport[HttpRequest, HttpResponse]):
    """Sends nothing: a pipeline that ends here has signed its request, which goes another way."""

    def open(self) -> None:
        """Nothing is opened."""

    def close(self) -> None:
        """Nothing is open."""

    def __exit__(self, *args: object) -> None:
        self.close()

    def send(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        """As if it had been accepted."""
        return Response(request, 202, "Accepted", {}, b"")


class MessagePipeline:
    """Runs requests with an account's credential. Any thread may call."""

    def __init__(self, service: QueueServiceClient, transport: HttpTransport[Any, Any]) -> None:
        self._transport = transport
        self._pipeline = _pipeline_to(transport, service.credential)
        self._signing = _pipeline_to(NullTransport(), service.credential)
        self._version = str(service.api_version)

    def run(
        self, method: str, url: str, text: str | None, *, connecting: float, reading: float
    ) -> HttpResponse:
        """One request. connecting, reading: seconds.

        Raises AzureError: HttpResponseError where the service refuses.
        """
        request = self._request(method, url, text)
        answer = self._pipeline.run(request, connection_timeout=connecting, read_timeout=reading)
        response: HttpResponse = answer.http_response
        if refusal := _refusal(response):
            raise refusal
        return response

    def run_all(
        self, asked: Sequence[RequestSpec], *, connections: int, connecting: float, reading: float
    ) -> list[AzureError | None] | None:
        """Requests side by side, over at most so many connections: what went wrong with each.

        None where the transport cannot: an HTTP proxy is between.
        """
        transport = self._transport
        if not isinstance(transport, LeanTransport):
            return None
        return transport.exchange(
            asked[0].url,
            asked,
            self.signed,
            _refusal,
            connections=connections,
            connecting=connecting,
            reading=reading,
        )

    def signed(self, asked: RequestSpec) -> HttpRequest:
        """The request as it travels. Raises AzureError: it is too late, or nothing can sign."""
        if asked.late and asked.late():
            raise ServiceRequestError("its time was over before it could be sent")
        request = self._request(asked.method, asked.url, asked.text)
        self._signing.run(request)
        return request

    def _request(self, method: str, url: str, text: str | None) -> HttpRequest:
        headers = {
            "x-ms-version": self._version,
            "x-ms-date": formatdate(usegmt=True),
            "x-ms-client-request-id": str(uuid4()),
            "User-Agent": _AGENT,
            "Accept": "application/xml",
        }
        body = None
        if text is not None:
            headers["Content-Type"] = "application/xml"
            body = f"<QueueMessage><MessageText>{escape(text)}</MessageText></QueueMessage>"
        return HttpRequest(method, url, headers=headers, content=body)


class QueueMessages:
    """The messages of one queue. `seconds` is the time to wait for the answer."""

    def __init__(self, pipeline: MessagePipeline, queue_url: str) -> None:
        """queue_url: with the signature, where one is used."""
        self._pipeline = pipeline
        self._url = queue_url.partition("?")[0] + "/messages"

    def put(self, text: str, delay: int, *, seconds: float) -> None:
        """Store a message that never expires; visible after `delay` seconds. Raises AzureError."""
        self._run("POST", _putting(delay), text, seconds)

    def put_all(
        self, texts: Sequence[tuple[str, int]], *, connections: int, seconds: float
    ) -> list[AzureError | None] | None:
        """Store messages side by side, in no certain order: what went wrong with each, as `put`
        would raise it. None where they are to be put one by one: an HTTP proxy is between.
        """
        asked = [RequestSpec("POST", self._url + _putting(delay), text) for text, delay in texts]
        return self._run_all(asked, connections, seconds)

    def receive(
        self, limit: int, hidden: int, *, seconds: float
    ) -> tuple[list[ReceivedMessage], Mapping[str, str]]:
        """Up to `limit` (at most 32) messages, hidden for so many seconds; the answer's headers.

        Raises AzureError: DecodeError for an answer that is none.
        """
        answer = self._run(
            "GET", f"?numofmessages={limit}&visibilitytimeout={hidden}", None, seconds
        )
        return _messages_of(answer), answer.headers

    def update(
        self, message: str, receipt: str, delay: int, text: str | None, *, seconds: float
    ) -> str:
        """Hide a message for `delay` seconds, with a new text or the old one; the new pop receipt.

        Raises AzureError.
        """
        query = f"/{quote(message)}?popreceipt={quote(receipt, safe='')}&visibilitytimeout={delay}"
        return str(self._run("PUT", query, text, seconds).headers["x-ms-popreceipt"])

    def delete(self, message: str, receipt: str, *, seconds: float) -> None:
        """Remove a message. Raises AzureError."""
        self._run("DELETE", _deleting(message, receipt), None, seconds)

    def delete_all(
        self,
        leases: Sequence[tuple[str, str, Callable[[], bool]]],
        *,
        connections: int,
        seconds: float,
    ) -> list[AzureError | None] | None:
        """Remove messages side by side, as `put_all` puts them.

        leases: (message, receipt, whether it is too late for it).
        """
        asked = [
            RequestSpec("DELETE", self._url + _deleting(message, receipt), late=late)
            for message, receipt, late in leases
        ]
        return self._run_all(asked, connections, seconds)

    def _run_all(
        self, asked: Sequence[RequestSpec], connections: int, seconds: float
    ) -> list[AzureError | None] | None:
        return self._pipeline.run_all(
            asked, connections=connections, connecting=min(seconds, 5.0), reading=seconds
        )

    def _run(self, method: str, rest: str, text: str | None, seconds: float) -> HttpResponse:
        return self._pipeline.run(
            method, self._url + rest, text, connecting=min(seconds, 5.0), reading=seconds
        )


def _putting(delay: int) -> str:
    hidden = f"visibilitytimeout={delay}&" if delay else ""
    return f"?{hidden}messagettl=-1"


def _deleting(message: str, receipt: str) -> str:
    return f"/{quote(message)}?popreceipt={quote(receipt, safe='')}"


def _messages_of(answer: HttpResponse) -> list[ReceivedMessage]:
    try:
        return [_received(each) for each in ElementTree.fromstring(answer.content)]
    except (ElementTree.ParseError, ValueError) as error:
        raise DecodeError(f"the answer is no list of messages: {error}", answer) from error


def _received(message: ElementTree.Element) -> ReceivedMessage:
    """Raises ValueError."""
    fields = {field.tag: field.text or "" for field in message}
    if not fields.get("MessageId") or not fields.get("PopReceipt"):
        raise ValueError("a message has no id or no pop receipt")
    put = fields.get("InsertionTime")
    return ReceivedMessage(
        fields["MessageId"],
        fields["PopReceipt"],
        int(fields.get("DequeueCount") or 1),
        parsedate_to_datetime(put).timestamp() if put else 0.0,
        fields.get("MessageText", ""),
    )


def _pipeline_to(transport: HttpTransport[Any, Any], credential: Any) -> Pipeline[Any, Any]:
    return Pipeline(transport, policies=[_credential_policy(credential)])


def _credential_policy(credential: Any) -> SansIOHTTPPolicy[Any, Any] | Any:
    """What signs: the SDK has made a policy of an account key already."""
    if isinstance(credential, AzureSasCredential):
        return AzureSasCredentialPolicy(credential)
    if hasattr(credential, "get_token"):
        return BearerTokenCredentialPolicy(credential, TOKEN_SCOPE)
    return credential


def _refusal(response: HttpResponse) -> HttpResponseError | None:
    """What the service refused the request with, if it did."""
    if response.status_code < 300:
        return None
    code = response.headers.get("x-ms-error-code", "")
    kind = ClientAuthenticationError if response.status_code in (401, 403) else HttpResponseError
    return kind(message=f"{code or response.status_code}: {response.reason}", response=response)
