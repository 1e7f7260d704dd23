"""Right and wrong uses, for type checkers alone: nothing here is ever run.

A wrong use carries a suppression for each checker; a suppression that suppresses nothing is an
error of its own, so every wrong use has to be found.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, assert_type

from aztask import (
    App,
    AsyncResult,
    CircuitBreaker,
    Context,
    ContextTask,
    Retry,
    RetryPolicy,
    Signature,
    Snooze,
    Task,
    WorkflowResult,
    chain,
    chord,
    group,
)
from aztask.testing import task_context

app = App("shop", broker="local://", results="local://", max_deliveries=5)
App("shop", brokr="local://")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@app.task
def resize(path: str, width: int, *, height: int = 0) -> str:
    return f"{path}{width}{height}"


@app.task(
    queue="slow",
    retry=RetryPolicy(max_retries=5),
    time_limit=10.0,
    breaker=CircuitBreaker(share=0.3),
)
def count(path: str) -> int:
    return len(path)


@app.task_with_context
def crawl(context: Context, url: str) -> int:
    return len(context.task_id + url)


def lease_of(url: str) -> float:
    return 10.0 + len(url)


@app.task_with_context(queue="slow", lease=lease_of)
def fetch(context: Context, url: str) -> bytes:
    context.lease.ensure()
    return url.encode()


assert_type(resize("a", 1), str)
assert_type(resize.delay("a", 1), AsyncResult[str])
assert_type(resize.delay("a", 1, height=2).get(timeout=1.0), str)
assert_type(count.delay("a"), AsyncResult[int])
assert_type(crawl.delay("http://localhost"), AsyncResult[int])
assert_type(fetch.with_options(delay=60, task_id="a").delay("x"), AsyncResult[bytes])
assert_type(resize.map([("a", 1), ("b", 2)]), list[AsyncResult[str]])

resize.delay("a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
resize.delay(1, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
resize.delay("a", 1, depth=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
crawl.delay()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
resize.with_options(dealy=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
resize.with_options(delay="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# Types that are converted are the same for type checkers: what is passed, and what is returned.


class Color(Enum):
    RED = "red"


@dataclass
class Order:
    id: int
    color: Color = Color.RED


@app.task(strict=True)
def place(order: Order, folders: set[Path]) -> dict[int, Order]:
    return {len(folders): order}


@app.task
async def paint(order: Order, color: Color) -> tuple[Order, Color]:
    return order, color


assert_type(place.delay(Order(1), {Path("a")}).get(), dict[int, Order])
assert_type(paint.delay(Order(1), Color.RED), AsyncResult[tuple[Order, Color]])
assert_type(place.map([(Order(1), {Path("a")})]), list[AsyncResult[dict[int, Order]]])
place.delay({"id": 1}, {Path("a")})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
place.delay(Order(1), {"a"})  # type: ignore[arg-type]  # pyright: ignore
paint.delay(Order(1), "red")  # type: ignore[call-overload]  # pyright: ignore
place.with_options(delay=3).delay(Order(1), 3)  # type: ignore[arg-type]  # pyright: ignore

# A signature takes all arguments, or those after the value of the element before it.

assert_type(paint.s(Order(1), Color.RED), Signature)
assert_type(paint.s(Color.RED), Signature)
assert_type(paint.s(color=Color.RED), Signature)
assert_type(paint.with_options(delay=3).s(Color.RED), Signature)
assert_type(paint.si(Order(1), Color.RED), Signature)
paint.s("red")  # type: ignore[call-overload]  # pyright: ignore
paint.s(Order(1), "red")  # type: ignore[call-overload]  # pyright: ignore
paint.si(Color.RED)  # type: ignore[call-arg, arg-type]  # pyright: ignore
crawl.s()
crawl.s("http://localhost")


async def asynchronous() -> None:
    assert_type(await resize.adelay("a", 1), AsyncResult[str])
    await resize.adelay(1)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]


@app.task(quue="slow")  # type: ignore[call-overload, untyped-decorator, unused-ignore]  # pyright: ignore
def wrong(path: str) -> int:
    return len(path)


@app.task_with_context(queue="orders", ordered=False)
def book(context: Context, amount: int) -> int:
    if context.session is not None:
        assert_type(context.session.id, str)
        context.session.state = {"amount": amount}
    return amount


@app.task(retry_strategy="defer")
def index(path: str) -> int:
    return len(path)


App("shop", retry_strategy="hold")
App("shop", retry_strategy="holt")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


app.queue("orders", sessions=True)
assert_type(book.with_options(session="a", ordered=True).map([(1,)]), list[AsyncResult[int]])
app.send("shop.book", [1], session="a")
book.with_options(session=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
book.with_options(ordered="no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.queue("orders", session=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# A task with a context is called without the context, or with one; it is sent without.

assert_type(crawl("http://localhost"), int)
assert_type(crawl(url="http://localhost"), int)
assert_type(fetch("http://localhost"), bytes)
with task_context(saved={"page": 3}, lease=timedelta(minutes=1)) as made:
    assert_type(made, Context)
    assert_type(crawl(made, "http://localhost"), int)
crawl(1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
crawl()  # type: ignore[call-overload]  # pyright: ignore
crawl("a", "b")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
crawl(made)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
crawl.delay(made, "http://localhost")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
resize(made, "a", 1)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
some_task: Task[..., Any] = crawl
some_context_task: ContextTask[[str], int] = crawl


# The result of an ``async def`` task has the awaited type; calling it gives a coroutine.


@app.task
async def download(url: str) -> int:
    return len(url)


@app.task(queue="slow", time_limit=timedelta(minutes=5))
async def upload(url: str, *, size: int = 0) -> str | None:
    return None if size else url


@app.task_with_context
async def stream(context: Context, url: str) -> bytes:
    context.lease.extend(timedelta(minutes=5))
    return url.encode()


async def awaiting() -> None:
    assert_type(await download("a"), int)
    assert_type(await stream("a"), bytes)
    assert_type(await download.adelay("a"), AsyncResult[int])
    assert_type(await upload.with_options(delay=1).adelay("a", size=2), AsyncResult[str | None])
    await download.adelay(1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


sent: AsyncResult[int] = download.delay("a")
assert_type(download.delay("a"), AsyncResult[int])
assert_type(download.delay("a").get(timeout=timedelta(seconds=5)), int)
assert_type(upload.delay("a").get(), str | None)
assert_type(stream.delay("a"), AsyncResult[bytes])
assert_type(stream.with_options(session="a").delay("a").get(), bytes)
assert_type(download.map([("a",), ("b",)]), list[AsyncResult[int]])
assert_type(download.with_options(delay=1).map([("a",)]), list[AsyncResult[int]])
coroutine: Coroutine[Any, Any, int] = download("a")
download.delay()  # type: ignore[call-overload]  # pyright: ignore
download.delay(1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
not_awaited: int = download("a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


# A duration is seconds or a timedelta, a time is a datetime.


@app.task(
    time_limit=timedelta(minutes=5),
    soft_time_limit=timedelta(minutes=4),
    lease=timedelta(seconds=30),
    max_lease=timedelta(hours=1),
    expires=timedelta(days=1),
    retry=RetryPolicy(delay=timedelta(seconds=1), max_delay=timedelta(hours=1), retry_on=OSError),
)
def long(path: str) -> int:
    raise Retry(delay=timedelta(minutes=1))


def lease_by_size(path: str) -> timedelta:
    return timedelta(seconds=len(path))


@app.task(lease=lease_by_size)
def short(path: str) -> int:
    raise Snooze(timedelta(minutes=1))


tomorrow = datetime.now(UTC) + timedelta(days=1)
App("shop", lease=timedelta(seconds=30), adaptive=(timedelta(seconds=5), timedelta(minutes=5)))
app.queue("films", lease=timedelta(minutes=1), time_to_live=timedelta(days=7))
app.receive("films", wait=timedelta(seconds=1))
app.send("shop.long", ["a"], delay=timedelta(seconds=5), expires=timedelta(hours=1))
app.send("shop.long", ["a"], eta=tomorrow, expires=tomorrow)
long.with_options(delay=timedelta(seconds=5), expires=tomorrow).delay("a")
long.s("a").with_options(delay=timedelta(seconds=5), expires=60)
long.with_options(eta=tomorrow, expires=3600).delay("a")
assert_type(RetryPolicy(delay=timedelta(seconds=1)).delay, float)
long.with_options(delay=tomorrow)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
long.with_options(eta=60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
long.with_options(eta=timedelta(seconds=60))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
long.with_options(expires="1h")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.send("shop.long", ["a"], delay="5s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.receive("films", wait="1s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
sent.get(timeout="5s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
made.lease.extend("5s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryPolicy(delay="1s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Retry(delay=tomorrow)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Snooze()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# A retry policy is a RetryPolicy.

App("shop", "local://")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
App("shop", retry=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryPolicy(retries=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@app.task(retry=3)  # type: ignore[call-overload, untyped-decorator, unused-ignore]  # pyright: ignore
def retried(path: str) -> int:
    return len(path)


@app.task(max_retries=3)  # type: ignore[call-overload, untyped-decorator, unused-ignore]  # pyright: ignore
def retried_too(path: str) -> int:
    return len(path)


@app.task(time_limit="1m")  # type: ignore[call-overload, untyped-decorator, unused-ignore]  # pyright: ignore
def limited(path: str) -> int:
    return len(path)


@app.task_with_context  # type: ignore[arg-type]  # pyright: ignore
def without_context(path: str) -> int:
    return len(path)


assert_type(resize.s("a.png", 200), Signature)
assert_type(count.si("a.png").with_options(queue="slow", delay=5), Signature)
assert_type(chain(resize.s("a.png", 200), count.s()).delay(), WorkflowResult)
assert_type((resize.s("a.png", 200) | count.s()).delay(workflow_id="w"), WorkflowResult)
chord([resize.s(name, 200) for name in ("a", "b")], count.s(), return_errors=True)
group(resize.s(name, 200) for name in ("a", "b"))
chain(resize)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
count.s("a").with_options(task_id="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@app.step
def charge(card: str, amount: int = 1) -> bytes:
    return card.encode() * amount


@app.step(name="ship", retry=RetryPolicy(), record_errors=True)
async def ship(parcel: bytes) -> str:
    return parcel.decode()


async def with_steps(context: Context) -> None:
    assert_type(context.step("count", len, "abc"), int)
    assert_type(await context.step("ship", ship, b"book", key="k"), str)
    assert_type(charge("visa"), bytes)
    assert_type(await ship(b"book"), str)
    assert_type(context.patched("new"), bool)
    assert_type(context.step_key, str | None)
    charge(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    context.step(len, "abc")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
