"""Put, receive, update and delete: every message costs two or three of these requests.

Why not the SDK's client: it spends three quarters of their CPU time on work that they do not need.

That work is serializers for arguments of any kind, models with unused fields, and fourteen pipeline
policies [measured: 0.5 ms against 0.17 ms for a put, 3.4 ms against 0.6 ms for reading an answer
with 32 messages]. So this module builds the requests itself, by the service's REST reference ("Put
Message", "Get Messages", "Update Message", "Delete Message"). It runs them through a pipeline of
the SDK's parts: the SDK's credentials sign (but for an account's key), its transport interface
sends, and its errors are raised. All other requests to a queue go through the SDK's client.

Rules
1. Nothing is sent twice here.
2. The header ``x-ms-error-code`` holds the service's verdict; the module `errors` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from itertools import count
from time import time
from typing import Any, Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass
from uuid import uuid4
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from azure.core.credentials import AzureSasCredential, TokenCredential
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
from azure.core.pipeline.transport import HttpTransport, RequestsTransport
from azure.core.rest import HttpRequest, HttpResponse
from azure.storage.queue import QueueClient, QueueServiceClient

from aztask.address.addresses import StorageQueueAddress
from aztask.azure.access import SharedKey, default_credential, filter_secrets
from aztask.azure.connection import Response, WireRequest
from aztask.azure.transport import LeanTransport
from aztask.support.clock import SYSTEM_CLOCK, Clock
from aztask.version import __version__

TOKEN_SCOPE: Final = "https://storage.azure.com/.default"  # noqa: S105  # no secret
"""The scope of tokens (the service's documentation, "Authorize with Microsoft Entra ID")."""

_AGENT: Final = f"aztask/{__version__}"


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as the service delivers it.

    token: the pop receipt.
    count: how often it was delivered, including this time.
    put_at: when it was sent, UTC epoch seconds; 0 if the answer does not say.
    """

    position: str
    token: str
    count: int
    put_at: float
    text: str


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request that is built when a connection is free for it.

    text: the message's text, if the request has one.
    late: called just before the request is sent; True: it is too late to send it.
    """

    method: str
    url: str
    text: str | None = None
    late: Callable[[], bool] | None = None


class NullTransport(HttpTransport[HttpRequest, HttpResponse]):
    """Sends nothing. A pipeline that ends here only signs; another transport sends the request."""

    def open(self) -> None:
        """Does nothing: there is no connection."""

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def __exit__(self, *args: object) -> None:
        self.close()

    def send(self, request: HttpRequest, **kwargs: Any) -> HttpResponse:
        """Return an answer as if the service had accepted the request."""
        return Response(request, 202, "Accepted", {}, b"")


class MessagePipeline:
    """Runs requests with an account's credential. Any thread may call."""

    def __init__(self, service: QueueServiceClient, transport: HttpTransport[Any, Any]) -> None:
        self._transport = transport
        self._key = _shared_key(service.credential)
        self._pipeline = self._pipeline_to(transport, service.credential)
        self._signing = self._pipeline_to(NullTransport(), service.credential)
        self._version = str(service.api_version)
        self._id = str(uuid4())
        self._ids = count()
        self._dated = (0, "")

    def _pipeline_to(
        self, transport: HttpTransport[Any, Any], credential: Any
    ) -> Pipeline[Any, Any]:
        return Pipeline(transport, [] if self._key else [_credential_policy(credential)])

    def run(
        self, method: str, url: str, text: str | None, *, connecting: float, reading: float
    ) -> HttpResponse:
        """Send one request. connecting, reading: time-outs in seconds.

        Raises AzureError; HttpResponseError if the service refuses the request.
        """
        response: HttpResponse
        if self._key is not None and isinstance(self._transport, LeanTransport):
            request = self._wire_request(method, url, text, self._key)
            response = self._transport.ask(request, connecting=connecting, reading=reading)
        else:
            answer = self._pipeline.run(
                self._request(method, url, text),
                connection_timeout=connecting,
                read_timeout=reading,
            )
            response = answer.http_response
        if refusal := _refusal(response):
            raise refusal
        return response

    def run_all(
        self, specs: Sequence[RequestSpec], *, connections: int, connecting: float, reading: float
    ) -> list[AzureError | None] | None:
        """Send requests in parallel over at most `connections`; returns the error of each, or None.

        Returns None instead of a list behind an HTTP proxy, where the transport cannot do this.
        """
        transport = self._transport
        if not isinstance(transport, LeanTransport):
            return None
        return transport.exchange(
            specs[0].url,
            specs,
            self.signed,
            _refusal,
            connections=connections,
            connecting=connecting,
            reading=reading,
        )

    def signed(self, spec: RequestSpec) -> WireRequest:
        """The signed request. Raises AzureError if it is too late or cannot be signed."""
        if spec.late and spec.late():
            raise ServiceRequestError("its time-out passed before it could be sent")
        if self._key is not None:
            return self._wire_request(spec.method, spec.url, spec.text, self._key)
        request = self._request(spec.method, spec.url, spec.text)
        self._signing.run(request)
        return WireRequest.of(request)

    def _wire_request(self, method: str, url: str, text: str | None, key: SharedKey) -> WireRequest:
        """The request that `key` signs, without the SDK's objects, which would cost as much."""
        headers, body = self._parts(text)
        headers["Authorization"] = key.authorization(method, url, headers, len(body or b""))
        return WireRequest.composed(method, url, headers, body or b"")

    def _request(self, method: str, url: str, text: str | None) -> HttpRequest:
        """The request for the SDK's pipeline, which signs it unless an account's key does."""
        headers, body = self._parts(text)
        if self._key is not None:
            length = len(body or b"")
            headers["Authorization"] = self._key.authorization(method, url, headers, length)
        return HttpRequest(method, url, headers=headers, content=body)

    def _parts(self, text: str | None) -> tuple[dict[str, str], bytes | None]:
        """The headers and the body of a request."""
        headers = {
            "x-ms-version": self._version,
            "x-ms-date": self._date(),
            "x-ms-client-request-id": f"{self._id}-{next(self._ids)}",
            "User-Agent": _AGENT,
            "Accept": "application/xml",
        }
        if text is None:
            return headers, None
        headers["Content-Type"] = "application/xml"
        # As bytes: of a str, azure-core counts the characters as Content-Length. A carriage
        # return as such would come back as a line feed (XML 1.0, 2.11).
        inside = escape(text, {"\r": "&#13;"})
        return headers, (
            f"<QueueMessage><MessageText>{inside}</MessageText></QueueMessage>".encode()
        )

    def _date(self) -> str:
        """The time as HTTP writes it, which is in whole seconds."""
        now = int(time())
        at, date = self._dated
        if at != now:
            date = formatdate(now, usegmt=True)
            self._dated = (now, date)
        return date


class QueueMessages:
    """The messages of one queue. `seconds` is how long to wait for each answer."""

    def __init__(self, pipeline: MessagePipeline, queue_url: str) -> None:
        """queue_url: a signature in it is cut off, because the credential adds it."""
        self._pipeline = pipeline
        self._url = queue_url.partition("?")[0] + "/messages"

    def put(self, text: str, delay: int, *, seconds: float) -> None:
        """Store a message that never expires and is visible after `delay` seconds.

        Raises AzureError.
        """
        self._run("POST", _putting(delay), text, seconds)

    def put_all(
        self, texts: Sequence[tuple[str, int]], *, connections: int, seconds: float
    ) -> list[AzureError | None] | None:
        """Store messages in parallel, in no guaranteed order; returns the error of each, or None.

        Returns None instead of a list behind an HTTP proxy: then put them one by one.
        """
        specs = [RequestSpec("POST", self._url + _putting(delay), text) for text, delay in texts]
        return self._run_all(specs, connections, seconds)

    def receive(
        self, limit: int, hidden: int, *, seconds: float
    ) -> tuple[list[ReceivedMessage], Mapping[str, str]]:
        """Receive up to `limit` (at most 32) messages and hide them for `hidden` seconds.

        Returns the messages and the answer's headers. Raises AzureError; DecodeError if the answer
        is not a list of messages.
        """
        answer = self._run(
            "GET", f"?numofmessages={limit}&visibilitytimeout={hidden}", None, seconds
        )
        return _messages_of(answer), answer.headers

    def update(
        self, message: str, receipt: str, delay: int, text: str | None, *, seconds: float
    ) -> str:
        """Hide a message for `delay` seconds; returns the new pop receipt.

        text: the new text; None keeps the old one. Raises AzureError.
        """
        query = f"/{quote(message)}?popreceipt={quote(receipt, safe='')}&visibilitytimeout={delay}"
        return str(self._run("PUT", query, text, seconds).headers["x-ms-popreceipt"])

    def delete(self, message: str, receipt: str, *, seconds: float) -> None:
        """Delete the message that the receipt is for. Raises AzureError."""
        self._run("DELETE", _deleting(message, receipt), None, seconds)

    def delete_all(
        self,
        leases: Sequence[tuple[str, str, Callable[[], bool]]],
        *,
        connections: int,
        seconds: float,
    ) -> list[AzureError | None] | None:
        """Delete messages in parallel; returns as `put_all`.

        leases: (message, receipt, a function that says whether it is too late).
        """
        specs = [
            RequestSpec("DELETE", self._url + _deleting(message, receipt), late=late)
            for message, receipt, late in leases
        ]
        return self._run_all(specs, connections, seconds)

    def _run_all(
        self, specs: Sequence[RequestSpec], connections: int, seconds: float
    ) -> list[AzureError | None] | None:
        return self._pipeline.run_all(
            specs, connections=connections, connecting=min(seconds, 5.0), reading=seconds
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
        # expat limits entities that multiply (since 2.4), and nothing outside is ever loaded.
        root = ElementTree.fromstring(answer.content)  # noqa: S314
        return [_received(each) for each in root]
    except (ElementTree.ParseError, ValueError) as error:
        raise DecodeError(f"the answer is not a list of messages: {error}", answer) from error


def _received(message: ElementTree.Element) -> ReceivedMessage:
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


def _shared_key(credential: Any) -> SharedKey | None:
    """What signs for the SDK's credential, if that is an account's key."""
    account, key = (getattr(credential, name, None) for name in ("account_name", "account_key"))
    if not isinstance(account, str) or not isinstance(key, str):
        return None
    try:
        return SharedKey(account, key)
    except ValueError:
        return None  # the SDK says what is wrong with it


def _credential_policy(credential: Any) -> SansIOHTTPPolicy[Any, Any] | Any:
    """The policy that signs requests. For an account key the SDK's credential is already one."""
    if isinstance(credential, AzureSasCredential):
        return AzureSasCredentialPolicy(credential)
    if hasattr(credential, "get_token"):
        return BearerTokenCredentialPolicy(credential, TOKEN_SCOPE)
    return credential


def _refusal(response: HttpResponse) -> HttpResponseError | None:
    """The error for a refused request; None if the service accepted it."""
    if response.status_code < 300:
        return None
    code = response.headers.get("x-ms-error-code", "")
    kind = ClientAuthenticationError if response.status_code in (401, 403) else HttpResponseError
    return kind(message=f"{code or response.status_code}: {response.reason}", response=response)


# -- The client ------------------------------------------------------------------------------------
#
# The storage SDK's client, set up as the broker needs it.
#
# Rules
# 1. The SDK's retries are off: a silent retry of a send stores the message twice, and its pauses of
#    15 s and more are longer than a lease [measured]. The caller, which knows the lease, sets each
#    request's time-outs.
# 2. If the environment sets an HTTP proxy, the SDK's own transport is used, otherwise the lean one.


class StorageClient:
    """The account's queues. Any thread may call; every process makes its own client."""

    def __init__(
        self,
        address: StorageQueueAddress,
        *,
        credential: TokenCredential | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """credential: replaces `default_credential` if the address has no key and no signature."""
        filter_secrets()
        self.address = address
        self.transport = _transport(address)
        self._service = QueueServiceClient(
            address.endpoint,
            credential=_credential_of(address, credential),
            transport=self.transport,
            retry_total=0,
            user_agent=f"aztask/{__version__}",
            message_encode_policy=None,
            message_decode_policy=None,
        )
        self._queues: dict[str, QueueClient] = {}
        self._pipeline = MessagePipeline(self._service, self.transport)
        self._clock = clock
        self._offset = 0.0

    @property
    def service(self) -> QueueServiceClient:
        """The SDK's client for requests that concern the account."""
        return self._service

    def queue(self, name: str) -> QueueClient:
        """The SDK's client for requests that concern one queue."""
        client = self._queues.get(name)
        if client is None:
            client = self._queues.setdefault(name, self._service.get_queue_client(name))
        return client

    def messages(self, name: str) -> QueueMessages:
        """Our own requests for the messages of one queue."""
        return QueueMessages(self._pipeline, self.queue(name).url)

    def learn_time(self, headers: Mapping[str, str]) -> None:
        """Learn the service's time from the ``Date`` header of an answer, if it has one."""
        date = headers.get("Date")
        if date:
            self._offset = parsedate_to_datetime(date).timestamp() - self._clock.wall()

    @property
    def offset(self) -> float:
        """Seconds that the service's clock is ahead of ours, to about a second."""
        return self._offset

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back."""
        self.transport.close()


def _credential_of(address: StorageQueueAddress, given: TokenCredential | None) -> Any:
    if address.key is not None:
        return {"account_name": address.account, "account_key": address.key.reveal()}
    if address.signature is not None:
        return AzureSasCredential(address.signature.reveal().lstrip("?"))
    return given or default_credential()


def _transport(address: StorageQueueAddress) -> HttpTransport[Any, Any]:
    parts = urlsplit(address.endpoint)
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname or ""):
        transport: HttpTransport[Any, Any] = RequestsTransport()
        return transport
    return LeanTransport(leased="/messages/")
