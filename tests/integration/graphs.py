"""The graphs of the tests of workflows. Senders in processes of their own import this module."""

from __future__ import annotations

from ledger_app import gather, work

from aztask.workflows.graphs import Graph, chain, chord, group

NAMES = {
    "chord": lambda: chord([work.s(f"m{n}") for n in range(5)], gather.s("body")),
    "chain": lambda: chain(
        work.s("first"), group(gather.s("left"), gather.s("right")), gather.s("body")
    ),
    "nested": lambda: chain(
        group(
            chord([work.s("a1"), work.s("a2")], gather.s("a")),
            chain(work.s("b1"), gather.s("b2")),
            group(),
        ),
        gather.s("body"),
    ),
}
VALUES = {
    "chord": [f"m{n}" for n in range(5)],
    "chain": ["first", "first"],
    "nested": [["a1", "a2"], "b1", []],
}
"""What the body of each graph returns, which is what it got."""


def graph_of(name: str) -> Graph:
    """The graph of that name; its tasks belong to the app of `ledger_app`."""
    return NAMES[name]()


def members(name: str, count: int) -> Graph:
    """A chord of `count` members, which take 0 to 40 ms."""
    header = [work.s(f"{name}{n}", n % 5 / 100) for n in range(count)]
    return chord(header, gather.s(name))
