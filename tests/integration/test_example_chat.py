"""The example `chat/`: over HTTP and in Chromium, while worker and web service are killed."""

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from browser import opened
from webexample import web_example

SERVER = ["-m", "uvicorn", "web:api", "--timeout-graceful-shutdown", "1", "--port"]
WORKER = [sys.executable, "-m", "aztask", "-A", "chat:app", "worker", "-c", "2"]
LONG = " ".join(f"w{number}" for number in range(80))
"""A question whose answer takes four seconds."""

ANSWER = "Your question 1 has 80 words. Backwards it is:\n" + " ".join(reversed(LONG.split()))
BOTH = pytest.mark.parametrize("chat", ["local", "servicebus"], indirect=True)
LOCAL = pytest.mark.parametrize("chat", ["local"], indirect=True)


@pytest.fixture
def chat(request, tmp_path):
    """The example, on files or on the emulator of Service Bus."""
    with web_example("chat", tmp_path, request.param) as example:
        yield example


@contextmanager
def working(chat, *arguments):
    """A worker of the example, which the end of the block kills."""
    with (chat.folder / "worker.log").open("ab") as log:
        worker = subprocess.Popen(
            [*WORKER, *arguments],
            cwd=chat.folder,
            env=chat.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()


def serving(chat):
    """The web service, until the block ends."""
    return chat.running([*SERVER, str(chat.port)])


def ask(page, question):
    page.fill("input[name=question]", question)
    page.click("button")


def text_of(page):
    return page.locator(".assistant").last.text_content()


def wait_for(page, text):
    """Until the last answer has this text."""
    page.wait_for_function(
        "text => [...document.querySelectorAll('.assistant')].at(-1).textContent.includes(text)",
        arg=text,
        timeout=60_000,
    )


def wait_for_end(page):
    page.wait_for_selector("button:enabled", timeout=60_000)


@BOTH
def test_over_http_each_word_comes_while_the_answer_is_written(chat):
    with serving(chat), working(chat), httpx.Client(base_url=chat.url, timeout=60) as client:
        body = {"messages": [{"role": "user", "text": LONG}]}
        answer = client.post("/answers", json=body).json()["id"]
        came, words, places = [], [], []
        with client.stream("GET", f"/answers/{answer}") as events:
            for line in events.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    places.append(value)
                elif name == "data":
                    words.append(json.loads(value))
                    came.append(time.monotonic())
        assert "".join(words) == ANSWER
        assert came[-1] - came[0] > 2.0, "not all at its end"
        again = client.get(f"/answers/{answer}", headers={"Last-Event-ID": places[-2]}).text
        assert again.count("\nid: ") == 1


@LOCAL
def test_a_chat_in_the_browser(chat):
    with serving(chat), working(chat), opened(chat.url, height=900) as page:
        ask(page, "how are you")
        wait_for_end(page)
        assert text_of(page) == "Your question 1 has 3 words. Backwards it is:\nyou are how"
        ask(page, "<b>and</b> now")
        wait_for_end(page)
        assert text_of(page).startswith("Your question 2 has 2 words")
        assert page.locator("b").count() == 0
        ask(page, "word " * 101)
        page.wait_for_selector(".assistant.failed", timeout=60_000)
        assert "more than 100 words" in text_of(page)
        wait_for_end(page)
        ask(page, "how are you")
        wait_for_end(page)
        assert text_of(page).startswith("Your question 3 has 3 words"), "without the failed one"


@LOCAL
def test_a_killed_worker_and_the_browser_shows_the_next_start_alone(chat):
    with serving(chat), opened(chat.url, height=900) as page:
        with working(chat, "--lease", "3s"):
            ask(page, LONG)
            wait_for(page, " w60")
        with working(chat, "--lease", "3s"):
            wait_for_end(page)
            assert text_of(page) == ANSWER
            assert page.locator(".failed").count() == 0


@LOCAL
def test_the_service_is_started_again_and_the_browser_goes_on(chat):
    with working(chat), ExitStack() as visit:
        with serving(chat):
            page = visit.enter_context(opened(chat.url, height=900))
            ask(page, LONG)
            wait_for(page, " w60")
        before = text_of(page)
        assert ANSWER.startswith(before)
        assert before != ANSWER
        with serving(chat):
            wait_for_end(page)
            assert text_of(page) == ANSWER
            assert page.locator(".failed").count() == 0
