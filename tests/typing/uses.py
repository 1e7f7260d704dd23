"""Right and wrong uses, for type checkers alone: nothing here is ever run.

A wrong use carries a suppression for each checker; a suppression that suppresses nothing is an
error of its own, so every wrong use has to be found.
"""

from __future__ import annotations

from typing import assert_type

from aztask import (
    App,
    AsyncResult,
    Context,
    RetryPolicy,
    Signature,
    WorkflowResult,
    chain,
    chord,
    group,
)

app = App("shop", broker="local://", results="local://", max_deliveries=5)
App("shop", brokr="local://")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@app.task
def resize(path: str, width: int, *, height: int = 0) -> str:
    return f"{path}{width}{height}"


@app.task(queue="slow", retry=RetryPolicy(max_retries=5), time_limit=10.0)
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

assert_type(resize.s("a.png", 200), Signature)
assert_type(count.si("a.png").with_options(queue="slow", delay=5), Signature)
assert_type(chain(resize.s("a.png", 200), count.s()).delay(), WorkflowResult)
assert_type((resize.s("a.png", 200) | count.s()).delay(workflow_id="w"), WorkflowResult)
chord([resize.s(name, 200) for name in ("a", "b")], count.s(), return_errors=True)
group(resize.s(name, 200) for name in ("a", "b"))
chain(resize)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
count.s("a").with_options(task_id="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
