"""Tests of the service without a worker: tasks run inline, in the test's own process."""

import json
import re
from collections.abc import Iterator

import pytest
from chat import Chat, Message, answer, app
from fastapi.testclient import TestClient
from web import api

from aztask.testing import Inline

QUESTION = {"messages": [{"role": "user", "text": "how are you"}]}


@pytest.fixture
def inline() -> Iterator[Inline]:
    """Run tasks where they are sent."""
    with app.inline() as running:
        yield running  # type: ignore[misc]


@pytest.fixture
def client(inline: Inline) -> Iterator[TestClient]:
    """A client of the service, whose lifespan is open."""
    with TestClient(api) as made:
        yield made


def words_of(events: str) -> list[str]:
    """The words of an answer, from the text of its events."""
    return [json.loads(data) for data in re.findall(r"^id: .*\ndata: (.*)$", events, re.MULTILINE)]


def test_the_words_of_an_answer(client: TestClient) -> None:
    started = client.post("/answers", json=QUESTION)
    assert started.status_code == 202
    events = client.get(f"/answers/{started.json()['id']}")
    assert events.headers["content-type"].startswith("text/event-stream")
    text = "Your question 1 has 3 words. Backwards it is:\nyou are how"
    assert "".join(words_of(events.text)) == text
    assert events.text.endswith("event: end\ndata:\n\n")
    assert app.result(started.json()["id"]).get(timeout=0) == text


def test_a_browser_that_comes_back_gets_the_rest(client: TestClient) -> None:
    address = f"/answers/{client.post('/answers', json=QUESTION).json()['id']}"
    whole = client.get(address).text
    third = re.findall(r"^id: (.*)$", whole, re.MULTILINE)[2]
    rest = client.get(address, headers={"Last-Event-ID": third}).text
    assert words_of(rest) == words_of(whole)[3:]
    assert client.get(address, headers={"Last-Event-ID": "a\tb"}).status_code == 422


def test_a_browser_whose_words_no_longer_count_begins_anew(client: TestClient) -> None:
    address = f"/answers/{client.post('/answers', json=QUESTION).json()['id']}"
    events = client.get(address, headers={"Last-Event-ID": "0123456789ab.2"}).text
    assert events.startswith("retry: 1000\n\nevent: reset\ndata:\n\nid: ")
    assert words_of(events) == words_of(client.get(address).text)


def test_a_task_that_fails(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "text": "word " * 101}]}
    events = client.get(f"/answers/{client.post('/answers', json=chat).json()['id']}").text
    assert "\n\nevent: failed\n" in events
    assert "more than 100 words" in events


def test_the_task_gets_all_that_was_said(client: TestClient, inline: Inline) -> None:
    roles = ["user", "assistant", "user"]
    chat = Chat(messages=[Message(role=role, text="hello") for role in roles])
    client.post("/answers", json=chat.model_dump())
    sent = inline.assert_sent(answer, chat)
    assert app.result(sent.id).get(timeout=0).startswith("Your question 2")
    assert client.post("/answers", json={"messages": []}).status_code == 422
