"""The emulator's page over HTTP, and in a browser."""

from __future__ import annotations

from urllib.request import urlopen

from azure.servicebus import ServiceBusMessage
from browser import opened
from rawclient import RawClient


def test_the_page_in_a_browser(bus, queue, client):
    name = queue()
    with client.get_queue_sender(name) as sender:
        sender.send_messages(ServiceBusMessage("<b>hello</b>", message_id="<i>"))
    raw = RawClient(bus.port)
    raw.attach(name, receive=True)
    address = f"http://{bus.host}:{bus.admin_port}"
    with urlopen(f"{address}/", timeout=5) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    with opened(f"{address}/") as page:
        wrong = []
        page.on("console", lambda said: wrong.append(said.text))
        row = page.locator("tr", has_text=f"from {name}")
        assert "raw" in row.inner_text()
        page.get_by_role("link", name=name, exact=True).click()
        assert page.locator("pre", has_text="<b>hello</b>").count() == 1
        assert page.locator("b").count() == 0
        ground = "getComputedStyle(document.querySelector('header')).backgroundColor"
        assert page.evaluate(ground) == "rgb(244, 246, 248)"
        assert wrong == []
    raw.socket.close()
