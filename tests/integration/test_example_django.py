"""The example `django/`: a shop over HTTP and in Chromium, on `local://` and on Service Bus."""

import re

import httpx
import pytest
from browser import opened
from waiting import wait_until
from webexample import web_example

PASSWORD = "only for this test"


@pytest.fixture(params=["local", "servicebus"])
def shop(request, tmp_path):
    """The shop with its table, its server and its worker."""
    with web_example("django", tmp_path, request.param) as example:
        example.environment["DJANGO_SUPERUSER_PASSWORD"] = PASSWORD
        example.run("manage.py", "migrate")
        example.run(
            *("manage.py", "createsuperuser", "--noinput"),
            *("--username", "admin", "--email", "admin@example.com"),
        )
        server = ["manage.py", "runserver", "--noreload", f"127.0.0.1:{example.port}"]
        worker = ["manage.py", "aztask_worker", "--pool", "threads", "-c", "2"]
        with example.running(server, worker):
            yield example


def test_over_http(shop):
    shop.run("manage.py", "makemigrations", "--check", "--dry-run")
    with httpx.Client(base_url=shop.url, follow_redirects=True, timeout=30) as client:
        page = client.get("/")
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)[1]
        form = {"article": "tea", "count": "3", "csrfmiddlewaretoken": token}
        order = client.post("/", data=form)
        assert "3 x tea" in order.text
        address = f"{order.url.path}state"
        wait_until(lambda: client.get(address).json()["ended"], 20, "the order is packed")
        assert client.get(address).json() == {
            "status": "SUCCESSFUL",
            "ended": True,
            "attempts": 1,
            "text": "parcel 1: 3 x tea, attempt 1",
        }
        assert client.get("/orders/99/state").status_code == 404


def test_in_the_browser(shop):
    with opened(shop.url, height=900) as page:
        page.fill("input[name=article]", "anvil")
        page.click("button")
        page.wait_for_selector("#status:has-text('FAILED')", timeout=20_000)
        assert page.inner_text("#attempts") == "2"
        assert page.inner_text("#text") == "ValueError: an anvil does not fit into a parcel"

        page.goto(f"{shop.url}/admin/orders/order/")
        page.fill("input[name=username]", "admin")
        page.fill("input[name=password]", PASSWORD)
        page.click("input[type=submit]")
        row = page.wait_for_selector("#result_list tbody tr")
        assert "FAILED" in row.inner_text()
        assert "an anvil does not fit" in row.inner_text()

        page.evaluate("document.querySelector('input.action-select').click()")
        page.select_option("select[name=action]", "pack_again")
        page.click("button[name=index]")
        page.wait_for_selector("text=1 sent")

        page.goto(shop.url)
        page.fill("input[name=article]", "tea")
        page.click("button")
        page.wait_for_selector("#status:has-text('SUCCESSFUL')", timeout=20_000)
        assert page.inner_text("#text") == "parcel 2: 1 x tea, attempt 1"
