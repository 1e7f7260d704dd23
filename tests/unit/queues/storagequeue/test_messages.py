"""The composed requests say what the SDK's own client says, and refusals are its errors."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest
from azure.core.credentials import AccessToken, AzureSasCredential
from azure.core.exceptions import ClientAuthenticationError, DecodeError, HttpResponseError
from azure.core.pipeline import PipelineContext, PipelineRequest
from azure.core.pipeline.transport import HttpTransport
from azure.core.rest import HttpRequest
from azure.core.utils import case_insensitive_dict
from azure.storage.queue import QueueServiceClient

from aztask.azure.transport import Response
from aztask.queues.storagequeue.messages import MessagePipeline, QueueMessages

KEY = base64.b64encode(b"k" * 32).decode()
URL = "https://shop.queue.core.windows.net"
ANSWER = (
    b"<QueueMessagesList><QueueMessage><MessageId>m</MessageId><PopReceipt>r</PopReceipt>"
    b"<InsertionTime>Sat, 21 Nov 2026 06:00:00 GMT</InsertionTime>"
    b"<ExpirationTime>Sat, 21 Nov 2026 07:00:00 GMT</ExpirationTime>"
    b"<TimeNextVisible>Sat, 21 Nov 2026 06:00:00 GMT</TimeNextVisible>"
    b"</QueueMessage></QueueMessagesList>"
)


MESSAGES = b"""<?xml version="1.0" encoding="utf-8"?><QueueMessagesList><QueueMessage>
<MessageId>m-1</MessageId><InsertionTime>Sat, 21 Nov 2026 06:00:00 GMT</InsertionTime>
<ExpirationTime>Fri, 31 Dec 9999 23:59:59 GMT</ExpirationTime>
<PopReceipt>AgAAAAMAAAAAAAAA+/=</PopReceipt>
<TimeNextVisible>Sat, 21 Nov 2026 06:05:00 GMT</TimeNextVisible>
<DequeueCount>3</DequeueCount><MessageText>&lt;&amp;&gt; \xc3\xbc</MessageText></QueueMessage>
<QueueMessage><MessageId>m-2</MessageId><InsertionTime>Sat, 21 Nov 2026 06:00:01 GMT</InsertionTime>
<ExpirationTime>Fri, 31 Dec 9999 23:59:59 GMT</ExpirationTime><PopReceipt>b</PopReceipt>
<TimeNextVisible>Sat, 21 Nov 2026 06:05:00 GMT</TimeNextVisible>
<DequeueCount>1</DequeueCount><MessageText>a</MessageText></QueueMessage></QueueMessagesList>"""


class Recorder(HttpTransport[Any, Any]):
    """Answers every request with the same status and keeps what was asked."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.status, self.code = 0, ""
        self.messages = MESSAGES

    def send(self, request: HttpRequest, **kwargs: Any) -> Response:
        self.requests.append(request)
        usual = {"GET": 200, "POST": 201, "PUT": 204, "DELETE": 204}[request.method]
        headers = {"x-ms-popreceipt": "new", "x-ms-error-code": self.code}
        headers["x-ms-time-next-visible"] = "Sat, 21 Nov 2026 06:00:00 GMT"
        headers["content-type"] = "application/xml"
        body = ANSWER if request.method == "POST" and not self.status else b""
        if request.method == "GET":
            body = self.messages
        fields = case_insensitive_dict(headers)
        return Response(request, self.status or usual, "Because", fields, body)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *args: object) -> None: ...


class Token:
    def get_token(self, *scopes: str, **kwargs: Any) -> AccessToken:
        return AccessToken(f"for {scopes[0]}", 2**40)


def both(credential: Any) -> tuple[Recorder, Any, QueueMessages]:
    recorder = Recorder()
    service = QueueServiceClient(
        URL,
        credential=credential,
        transport=recorder,
        retry_total=0,
        message_encode_policy=None,
        message_decode_policy=None,
    )
    queue = service.get_queue_client("jobs")
    return recorder, queue, QueueMessages(MessagePipeline(service, recorder), queue.url)


def said(request: HttpRequest) -> tuple[Any, ...]:
    parts = urlsplit(request.url)
    content: Any = request.content
    text = ElementTree.fromstring(content).findtext("MessageText") if content else None
    return request.method, parts.netloc, parts.path, parse_qs(parts.query), text


KEYED = {"account_name": "shop", "account_key": KEY}
RECEIPT = "AgAAAAMAAAAAAAAA+/=&?"


@pytest.mark.parametrize("text", ["aGVsbG8=", "<&>\"' ü"])
@pytest.mark.parametrize("credential", [KEYED, AzureSasCredential("sv=1&sig=a%2Bb"), Token()])
def test_they_say_what_the_sdk_says(credential, text):
    recorder, queue, messages = both(credential)
    queue.send_message(text, time_to_live=-1)
    messages.put(text, 0, seconds=5)
    queue.send_message(text, visibility_timeout=7, time_to_live=-1)
    messages.put(text, 7, seconds=5)
    queue.update_message("m-1", RECEIPT, content=text, visibility_timeout=9)
    assert messages.update("m-1", RECEIPT, 9, text, seconds=5) == "new"
    queue.update_message("m-1", RECEIPT, visibility_timeout=0)
    messages.update("m-1", RECEIPT, 0, None, seconds=5)
    queue.delete_message("m-1", RECEIPT)
    messages.delete("m-1", RECEIPT, seconds=5)
    next(queue.receive_messages(messages_per_page=7, visibility_timeout=30).by_page())
    messages.receive(7, 30, seconds=5)
    theirs, ours = recorder.requests[::2], recorder.requests[1::2]
    assert [said(request) for request in ours] == [said(request) for request in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("x-ms-version", "Content-Type"):
            assert mine.headers.get(name) == other.headers.get(name)
        assert ("Authorization" in mine.headers) == ("Authorization" in other.headers)
        scheme = other.headers.get("Authorization", "").split(":")[0]
        assert mine.headers.get("Authorization", "").startswith(scheme)


@pytest.mark.parametrize("url", [URL, "http://127.0.0.1:10001/shop"])
@pytest.mark.parametrize("receipt", [RECEIPT, "", "ü %"])
def test_an_accounts_key_signs_as_the_sdk_does(url, receipt):
    """Also what a local server has its account in the path for."""
    recorder = Recorder()
    service = QueueServiceClient(url, credential=KEYED, transport=recorder, retry_total=0)
    messages = QueueMessages(MessagePipeline(service, recorder), f"{url}/jobs")
    messages.put("a\r\nü", 7, seconds=5)
    messages.update("m-1", receipt, 9, None, seconds=5)
    messages.update("m-1", receipt, 9, "", seconds=5)
    messages.delete("m-1", receipt, seconds=5)
    messages.receive(7, 30, seconds=5)
    assert len(recorder.requests) == 5
    for request in recorder.requests:
        ours = request.headers.pop("Authorization")
        service.credential.on_request(PipelineRequest(request, PipelineContext(recorder)))
        assert ours == request.headers["Authorization"]


@pytest.mark.parametrize(("status", "kind"), [(403, ClientAuthenticationError), (404, None)])
def test_a_refusal_is_the_sdks_error_with_the_services_code(status, kind):
    recorder, _, messages = both(KEYED)
    recorder.status, recorder.code = status, "TheCode"
    with pytest.raises(kind or HttpResponseError) as caught:
        messages.delete("m", RECEIPT, seconds=5)
    assert caught.value.status_code == status
    assert caught.value.response.headers["x-ms-error-code"] == "TheCode"
    assert "TheCode" in str(caught.value)


def test_what_is_received_is_what_the_sdk_receives():
    _, queue, messages = both(KEYED)
    theirs = list(next(queue.receive_messages().by_page()))
    ours, headers = messages.receive(32, 30, seconds=5)
    assert [(each.position, each.token, each.count, each.text) for each in ours] == [
        (each.id, each.pop_receipt, each.dequeue_count, each.content) for each in theirs
    ]
    assert [each.put_at for each in ours] == [each.inserted_on.timestamp() for each in theirs]
    assert headers["Content-Type"] == "application/xml"
    assert len(ours) == 2


def test_an_empty_queue_gives_nothing():
    recorder, _, messages = both(KEYED)
    recorder.messages = b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?><QueueMessagesList />'
    assert messages.receive(32, 30, seconds=5)[0] == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        b"\x00",
        MESSAGES.replace(b"<MessageId>m-2</MessageId>", b""),
        MESSAGES.replace(b"<PopReceipt>b</PopReceipt>", b"<PopReceipt/>"),
        MESSAGES.replace(b"<DequeueCount>3<", b"<DequeueCount>three<"),
        MESSAGES.replace(b"Sat, 21 Nov 2026 06:00:01 GMT", b"yesterday"),
    ],
    ids=range(7),
)
def test_an_answer_that_is_none_is_the_sdks_error(answer):
    recorder, _, messages = both(KEYED)
    recorder.messages = answer
    with pytest.raises(DecodeError, match="not a list of messages"):
        messages.receive(32, 30, seconds=5)


def test_a_text_of_another_program_is_put_as_it_is():
    """The length that is signed is that of its bytes, and XML keeps its carriage returns."""
    recorder, _, messages = both(KEYED)
    messages.put("a\r\nü", 0, seconds=5)
    (request,) = recorder.requests
    assert request.headers["Content-Length"] == str(len(request.content))
    assert said(request)[-1] == "a\r\nü"
