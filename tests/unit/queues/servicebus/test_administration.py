"""The administration client of a local Service Bus: plain HTTP, or TLS with a given certificate."""

from types import SimpleNamespace

from aztask.queues.servicebus import admin
from aztask.queues.servicebus.admin import PlainTransport, administration_client

STRING = "Endpoint=sb://127.0.0.1:5300;SharedAccessKeyName=k;SharedAccessKey=a2V5"


class Inner:
    def __init__(self):
        self.calls = []

    def send(self, request, **options):
        self.calls.append((request.url, options))
        return "answer"

    def open(self):
        self.calls.append("open")

    def close(self):
        self.calls.append("close")


def test_only_the_scheme_is_put_back(monkeypatch):
    inner = Inner()
    monkeypatch.setattr(admin, "RequestsTransport", lambda: inner)
    request = SimpleNamespace(url="https://127.0.0.1:5300/q?next=https://a")
    with PlainTransport() as transport:
        assert transport.send(request, stream=True) == "answer"
    url = "http://127.0.0.1:5300/q?next=https://a"
    assert inner.calls == ["open", (url, {"stream": True}), "close"]


def test_with_a_certificate_tls_is_spoken(monkeypatch):
    made = []
    monkeypatch.setattr(
        admin.ServiceBusAdministrationClient,
        "from_connection_string",
        lambda text, **options: made.append((text, options)),
    )
    administration_client(STRING)
    administration_client(STRING, certificate="/ca.pem")
    (plain, (text, secure)) = made[0][1], made[1]
    assert isinstance(plain["transport"], PlainTransport)
    assert (text, secure) == (STRING, {"connection_verify": "/ca.pem"})
