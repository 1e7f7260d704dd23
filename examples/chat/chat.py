"""The task of the example: it answers a chat, word by word."""

import os
import re
import time
from collections.abc import Iterator

from pydantic import BaseModel, Field

from aztask import App, RetryPolicy

PAUSE = 0.05
"""Seconds for which the model thinks about a word."""

app = App(
    "chat",
    broker=os.environ.get("AZTASK_BROKER", "local://"),
    results=os.environ.get("AZTASK_RESULTS", "local://"),
    retry=RetryPolicy(max_retries=2, delay=0.5, give_up_on=(ValueError,)),
)


class Message(BaseModel):
    """One message of a chat."""

    role: str = Field(pattern="^(user|assistant)$")
    text: str = Field(min_length=1, max_length=10_000)


class Chat(BaseModel):
    """All messages so far. A model remembers nothing, so it gets them each time."""

    messages: list[Message] = Field(min_length=1, max_length=200)


@app.task
def answer(chat: Chat) -> Iterator[str]:
    """Emit the answer word by word. The result of the task is the whole answer."""
    words = []
    for word in model(chat.messages):
        words.append(word)
        yield word
    return "".join(words)


def model(messages: list[Message]) -> Iterator[str]:
    """Stands in for a language model: yields words, with pauses, as the stream of an SDK does."""
    question = messages[-1].text.split()
    if len(question) > 100:
        raise ValueError("the question has more than 100 words")
    number = sum(message.role == "user" for message in messages)
    text = f"Your question {number} has {len(question)} words. Backwards it is:\n"
    for word in re.findall(r"\S+\s*", text + " ".join(reversed(question))):
        time.sleep(PAUSE)
        yield word
