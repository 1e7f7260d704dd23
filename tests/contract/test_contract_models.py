"""The modelled services of the simulation beside Azurite, request for request.

Both get the same random requests, and time passes for both. Each answer must be the same: what was
found, and the code of each refusal. (Service Bus: `tests/simulation/test_bus_and_engine.py`.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import azurite
import pytest
from azure.core import MatchConditions
from azure.core.exceptions import AzureError
from azure.data.tables import TableClient, UpdateMode
from services import StorageQueues, Tables
from services.storagebroker import ModelClient
from services.tableclient import ModelTable
from simulated import line
from subjects import ShiftedClock

from aztask.address.addresses import StorageQueueAddress
from aztask.address.urls import parse_broker
from aztask.queues.storagequeue.errors import failure_of
from aztask.queues.storagequeue.messages import QueueMessages, StorageClient
from aztask.stores.tables.errors import TABLE_ROLE, verdict

STEPS: Final = 40
SEEDS: Final = range(4)
SECONDS: Final = 10.0
ALL: Final = 32
"""A receive takes all that is visible: the service promises no order."""


class Steps:
    """What was asked, for the text of a failure."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def same(self, what: str, answers: list[Any]) -> Any:
        """The answer of both."""
        self.done.append(what)
        assert answers[0] == answers[1], "\n".join(self.done)
        return answers[0]


# -- Storage queues ------------------------------------------------------------------------------


@dataclass
class QueueSide:
    """One of the two: a queue, with the receipts of its messages by their texts."""

    client: StorageClient
    name: str
    ids: dict[str, str] = field(default_factory=dict)
    receipts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def messages(self) -> QueueMessages:
        return self.client.messages(self.name)

    def put(self, text: str, delay: int) -> str:
        return self._code(lambda: self.messages.put(text, delay, seconds=SECONDS))

    def receive(self, hidden: int) -> Any:
        found = list[Any]()

        def take() -> None:
            found.extend(self.messages.receive(ALL, hidden, seconds=SECONDS)[0])

        if code := self._code(take):
            return code
        for each in found:
            self.ids[each.text] = each.position
            self.receipts.setdefault(each.text, []).append(each.token)
        return sorted((each.text, each.count) for each in found)

    def update(self, text: str, which: int, delay: int, new: str | None) -> str:
        def change() -> None:
            receipt = self.messages.update(
                self.ids[text], self.receipts[text][which], delay, new, seconds=SECONDS
            )
            self.receipts[text].append(receipt)
            if new is not None:
                self.ids[new] = self.ids[text]
                self.receipts[new] = [receipt]

        return self._code(change)

    def delete(self, text: str, which: int) -> str:
        receipt = self.receipts[text][which]
        return self._code(lambda: self.messages.delete(self.ids[text], receipt, seconds=SECONDS))

    def peek(self) -> list[tuple[str, int]]:
        found = self.client.queue(self.name).peek_messages(max_messages=ALL)
        return sorted((str(each.content), int(each.dequeue_count or 0)) for each in found)

    def count(self) -> int:
        found = self.client.queue(self.name).get_queue_properties()
        return int(found.approximate_message_count or 0)

    def _code(self, call: Callable[[], object]) -> str:
        try:
            call()
        except AzureError as error:
            return failure_of(error, self.name).code
        return ""


class QueueCourse:
    """Random requests to one queue."""

    def __init__(self, seed: int, sides: tuple[QueueSide, QueueSide]) -> None:
        self.dice = random.Random(seed)
        self.sides = sides
        self.steps = Steps()
        self.texts = 0
        for side in sides:
            side.client.queue(side.name).create_queue()

    def both(self, what: str, call: Callable[[QueueSide], Any]) -> Any:
        return self.steps.same(what, [call(side) for side in self.sides])

    def step(self, pass_time: Callable[[float], None]) -> None:
        dice = self.dice
        hidden, delay = dice.choice((35, 95)), dice.choice((0, 0, 35))
        known = list(self.sides[0].receipts)
        kind = dice.choice(("put", "put", "receive", "update", "update", "delete", "time", "peek"))
        if kind == "put":
            self.texts += 1
            text = f"t{self.texts}"
            self.both(f"put {text} {delay}", lambda side: side.put(text, delay))
        elif kind == "receive":
            self.both(f"receive {hidden}", lambda side: side.receive(hidden))
        elif kind == "peek":
            self.both("peek", lambda side: side.peek())
            self.both("count", lambda side: side.count())
        elif kind == "time":
            seconds = dice.choice((10.0, 40.0, 120.0))
            self.steps.done.append(f"{seconds} seconds")
            pass_time(seconds)
        elif known:
            text, which = dice.choice(known), dice.choice((-1, -1, -1, 0))
            if kind == "delete":
                self.both(f"delete {text} {which}", lambda side: side.delete(text, which))
                return
            self.texts += 1
            new = dice.choice((None, f"t{self.texts}"))
            what = f"update {text} {which} {delay} {new}"
            self.both(what, lambda side: side.update(text, which, delay, new))


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    machine = ShiftedClock(start=time.time())
    with azurite.running(tmp_path_factory.mktemp("queues")) as server:
        address = parse_broker(server.connection_string)
        assert isinstance(address, StorageQueueAddress)
        real = StorageClient(address, clock=machine.clock)

        def pass_time(seconds: float) -> None:
            server.advance(seconds)
            machine.pass_time(seconds)

        yield real, ModelClient(StorageQueues(machine.clock), line(machine.clock)), pass_time
        real.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_storage_queues_are_as_azurite(queues: tuple[Any, ...], seed: int) -> None:
    *clients, pass_time = queues
    first, second = (QueueSide(each, f"models-{seed}") for each in clients)
    course = QueueCourse(seed, (first, second))
    for _ in range(STEPS):
        course.step(pass_time)


@pytest.mark.parametrize(
    ("text", "delay"), [("x" * 65536, 0), ("x" * 65537, 0), ("x", 604_800), ("x", 604_801)]
)
def test_the_limits_of_storage_queues(queues: tuple[Any, ...], text: str, delay: int) -> None:
    name = f"models-limits-{len(text)}-{delay}"
    sides = [QueueSide(each, name) for each in queues[:2]]
    for side in sides:
        side.client.queue(side.name).create_queue()
    Steps().same(f"{len(text)} {delay}", [bool(side.put(text, delay)) for side in sides])


def test_a_queue_that_does_not_exist(queues: tuple[Any, ...]) -> None:
    sides = [QueueSide(each, "models-missing") for each in queues[:2]]
    assert Steps().same("put", [side.put("x", 0) for side in sides]) == "QueueNotFound"
    assert Steps().same("receive", [side.receive(35) for side in sides]) == "QueueNotFound"


# -- tables --------------------------------------------------------------------------------------


FILTERS: Final = (
    ("PartitionKey eq @p", {"p": "p0"}),
    ("PartitionKey eq @p and RowKey ge @a and RowKey lt @b", {"p": "p1", "a": "r1", "b": "r3"}),
    ("PartitionKey ge @a and PartitionKey lt @b", {"a": "p0", "b": "p1~"}),
    ("PartitionKey gt @a and (RowKey lt @r or flag eq true)", {"a": "p", "r": "r2"}),
    ("PartitionKey eq @p and number lt @n", {"p": "p0", "n": 2.5}),
    ("PartitionKey ge 'p' and PartitionKey lt 'q' and text eq @t", {"t": "it's"}),
    (
        "( ( RowKey ge @a and RowKey lt @b ) or ( RowKey eq @c ) )",
        {"a": "r0", "b": "r1", "c": "r3"},
    ),
    ("number ge @n and flag eq false", {"n": 2}),
)


@dataclass
class TableSide:
    """One of the two: a table, with the tags of its rows."""

    table: Any
    tags: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def write(self, what: str, row: dict[str, Any], which: int | None) -> str:
        """which: of the row's tags, the one to ask for; None: any."""
        place = (row["PartitionKey"], row["RowKey"])
        options = self._condition(place, which)
        calls: dict[str, Callable[[], Any]] = {
            "create": lambda: self.table.create_entity(row),
            "replace": lambda: self.table.update_entity(row, mode=UpdateMode.REPLACE, **options),
            "merge": lambda: self.table.update_entity(row, mode=UpdateMode.MERGE, **options),
            "put": lambda: self.table.upsert_entity(row, mode=UpdateMode.REPLACE),
            "put merged": lambda: self.table.upsert_entity(row, mode=UpdateMode.MERGE),
        }
        return self._code(lambda: self._note(place, calls[what]()))

    def delete(self, place: tuple[str, str], which: int | None) -> Any:
        seen: list[int] = []

        def note(answer: Any) -> None:
            seen.append(answer.http_response.status_code)

        options = self._condition(place, which)
        code = self._code(
            lambda: self.table.delete_entity(*place, raw_response_hook=note, **options)
        )
        return code or seen

    def together(self, steps: list[tuple[str, dict[str, Any], int | None]]) -> str:
        changes: list[tuple[Any, ...]] = []
        for what, row, which in steps:
            options = self._condition((row["PartitionKey"], row["RowKey"]), which)
            if what in ("replace", "merge"):
                mode = UpdateMode.REPLACE if what == "replace" else UpdateMode.MERGE
                changes.append(("update", row, {"mode": mode, **options}))
            elif what.startswith("put"):
                mode = UpdateMode.REPLACE if what == "put" else UpdateMode.MERGE
                changes.append(("upsert", row, {"mode": mode}))
            else:
                changes.append((what, row, options if what == "delete" else {}))

        def send() -> None:
            answers = self.table.submit_transaction(changes)
            for (what, row, _), answer in zip(steps, answers, strict=True):
                if what != "delete":
                    self._note((row["PartitionKey"], row["RowKey"]), answer)

        return self._code(send)

    def get(self, place: tuple[str, str]) -> Any:
        found: list[Any] = []
        if code := self._code(lambda: found.append(self.table.get_entity(*place))):
            return code
        (entity,) = found
        return dict(entity), entity.metadata["etag"] == self.tags[place][-1]

    def query(self, text: str, values: dict[str, Any], select: list[str] | None) -> Any:
        found = self.table.query_entities(
            text, parameters=values, results_per_page=3, select=select
        )
        return [dict(each) for each in found]

    def _condition(self, place: tuple[str, str], which: int | None) -> dict[str, Any]:
        tags = self.tags.get(place)
        if which is None or not tags:
            return {}
        return {"etag": tags[which], "match_condition": MatchConditions.IfNotModified}

    def _note(self, place: tuple[str, str], answer: Any) -> None:
        self.tags.setdefault(place, []).append(answer["etag"])

    @staticmethod
    def _code(call: Callable[[], object]) -> str:
        try:
            call()
        except AzureError as error:
            found = verdict(error, "the table", TABLE_ROLE)
            return f"{type(found).__name__} {found}"
        return ""


class TableCourse:
    """Random requests to one table."""

    def __init__(self, seed: int, sides: tuple[TableSide, TableSide]) -> None:
        self.dice = random.Random(seed)
        self.sides = sides
        self.steps = Steps()
        for side in sides:
            side.table.create_table()

    def both(self, what: str, call: Callable[[TableSide], Any]) -> Any:
        return self.steps.same(what, [call(side) for side in self.sides])

    def _place(self) -> tuple[str, str]:
        return f"p{self.dice.randrange(3)}", f"r{self.dice.randrange(4)}"

    def _row(self, place: tuple[str, str] | None = None) -> dict[str, Any]:
        dice = self.dice
        partition, row = place or self._place()
        values: dict[str, Any] = {
            "text": dice.choice(("it's", "", "\xfc\U0001f600", None)),
            "number": dice.choice((1, 2.5, -7, float("inf"))),
            "flag": dice.choice((True, False)),
            "data": dice.choice((b"", b"\x00\xff", None)),
        }
        names = dice.sample(sorted(values), dice.randint(0, 4))
        return {
            "PartitionKey": partition,
            "RowKey": row,
            **{name: values[name] for name in names},
        }

    def step(self) -> None:
        dice = self.dice
        which = dice.choice((None, -1, -1, 0))
        writes = ("create", "create", "replace", "merge", "put", "put merged")
        kind = dice.choice(("write", "write", "write", "delete", "together", "get", "query"))
        if kind == "write":
            what, row = dice.choice(writes), self._row()
            self.both(f"{what} {row} {which}", lambda side: side.write(what, row, which))
        elif kind == "delete":
            place = self._place()
            self.both(f"delete {place} {which}", lambda side: side.delete(place, which))
        elif kind == "together":
            partition, rows = f"p{dice.randrange(3)}", dice.sample(range(4), dice.randint(1, 3))
            steps = [
                (dice.choice((*writes, "delete")), self._row((partition, f"r{row}")), which)
                for row in rows
            ]
            self.both(f"together {steps}", lambda side: side.together(steps))
        elif kind == "get":
            place = self._place()
            self.both(f"get {place}", lambda side: side.get(place))
        else:
            text, values = dice.choice(FILTERS)
            select = dice.choice((None, ["RowKey", "number"]))
            self.both(f"query {text} {select}", lambda side: side.query(text, values, select))


@pytest.mark.parametrize("seed", SEEDS)
def test_tables_are_as_azurite(seed: int) -> None:
    account = azurite.kept("table").connection_string
    name = f"models{seed}"
    with TableClient.from_connection_string(account, name, retry_total=0) as real:
        model = ModelTable(Tables(ShiftedClock().clock), line(), name)
        course = TableCourse(seed, (TableSide(real), TableSide(model)))
        for _ in range(2 * STEPS):
            course.step()
