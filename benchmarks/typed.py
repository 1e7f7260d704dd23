"""What the converters cost a send of plain arguments, beside the same send without them.

Usage: python benchmarks/typed.py [--check] [--rounds N] [--sends N]

One process sends to a local queue, which is the cheapest send that there is, in short turns: in one
turn as aztask is, in the next with `Task._invocation` as it was before there were converters. The
order of the variants is drawn for each round. The cost of a variant is the mean of the cheapest
tenth of its turns, since other programs of the machine can only add to one; CPU time.

The bound is that of issue "Every desk": at most 2 % of a send, for annotations that are all plain.
The send of a dataclass, which is converted, is shown without a bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from common import machine

from aztask import App
from aztask.task import Invocation, Task

BOUND = 1.02


@dataclass
class Line:
    """A part of what is converted."""

    name: str
    price: Decimal


@dataclass
class Invoice:
    """What is converted."""

    number: int
    lines: list[Line]


def before(task: Task[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
    """`Task._invocation` without converters."""
    task.check_arguments(args, kwargs)
    return Invocation(args, kwargs)


def turn(send: Callable[[], object], count: int) -> float:
    """CPU time of one send, in microseconds."""
    begun = time.process_time()
    for _ in range(count):
        send()
    return (time.process_time() - begun) / count * 1e6


def cost(turns: list[float]) -> float:
    """The mean of the cheapest tenth."""
    return statistics.fmean(sorted(turns)[: max(1, len(turns) // 10)])


def measure(rounds: int, sends: int) -> float:
    """Print the costs; returns the ratio that has a bound."""
    app = App("bench", broker="local://")

    @app.task
    def resize(path: str, width: int, quality: float = 0.5) -> str:
        return path

    @app.task
    def render(invoice: Invoice) -> str:
        return str(invoice.number)

    app.broker.declare("default")
    invoice = Invoice(7, [Line("paper", Decimal("4.5")), Line("ink", Decimal(9))])
    plain = {"number": 7, "lines": [{"name": "paper", "price": Decimal("4.5")}] * 2}
    variants: dict[str, tuple[Any, Callable[[], object]]] = {
        "without": (before, lambda: resize.delay("a.png", 200, 0.5)),
        "plain": (Task._invocation, lambda: resize.delay("a.png", 200, 0.5)),
        "keywords": (Task._invocation, lambda: resize.delay("a.png", width=200)),
        "keywords without": (before, lambda: resize.delay("a.png", width=200)),
        "a dict": (before, lambda: render.delay(plain)),  # type: ignore[arg-type]
        "a dataclass": (Task._invocation, lambda: render.delay(invoice)),
    }
    turns: dict[str, list[float]] = {name: [] for name in variants}
    now = Task._invocation
    for number in range(rounds + 1):
        for name in random.sample(list(variants), len(variants)):
            Task._invocation, send = variants[name]  # type: ignore[method-assign]
            took = turn(send, sends)
            if number:  # the first round opens connections and makes the converters
                turns[name].append(took)
    Task._invocation = now  # type: ignore[method-assign]
    for name, each in turns.items():
        print(f"  {name:18} {cost(each):6.1f} us/send")
    ratio = cost(turns["plain"]) / cost(turns["without"])
    named = cost(turns["keywords"]) / cost(turns["keywords without"])
    print(
        f"  {'holds' if ratio <= BOUND else 'FAILS'}   plain/without: {ratio:.3f} (at most {BOUND})"
    )
    print(f"          with a keyword: {named:.3f}")
    return ratio


def main() -> None:
    """Measure in a folder of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--sends", type=int, default=20)
    options = parser.parse_args()
    print("benchmark: CPU time of a send of plain arguments, with converters and without")
    print(machine())
    print()
    print(f"local queue, {options.rounds} turns of {options.sends} sends for each variant")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        ratio = measure(options.rounds, options.sends)
    if options.check and ratio > BOUND:
        sys.exit(1)


if __name__ == "__main__":
    main()
