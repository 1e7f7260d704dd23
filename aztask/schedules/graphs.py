"""Workflows as the value of a schedule: packed into the body of its message, and read again.

Rules
1. Each call keeps its arguments as the codec encoded them, as the message of a task does.
2. A task is known by its name: the app that starts the workflow must have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

import msgpack

from aztask.errors import UnknownTask
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.stores.records.damage import Damaged
from aztask.workflows.graphs import Callee, Chain, Chord, Graph, Group, Signature, calls_of

VERSION: Final = 1
_FIELDS: Final = {"task": 7, "chain": 3, "group": 3, "chord": 5}
"""How many fields each kind has, with its own name. A newer release may add some."""


def pack_graph(codec: Codec, graph: Graph) -> bytes:
    """The graph as bytes; `GraphReader` reads them. Raises EncodeError."""
    packed = [VERSION, _packed(codec, graph, 0)]
    data: bytes = msgpack.packb(packed, unicode_errors="surrogatepass")
    return data


def _packed(codec: Codec, graph: Graph | None, given: int) -> Any:
    """given: how many values come before the arguments of the calls that start at once."""
    if graph is None:
        return None
    if isinstance(graph, Signature):
        parts = graph.plain_arguments(0 if graph.immutable else given)
        encoded = codec.encode_arguments(*parts)
        return ["task", graph.task.name, *encoded, dict(graph.options), graph.immutable]
    if isinstance(graph, Chain):
        elements = [
            _packed(codec, each, given if number == 0 else 1)
            for number, each in enumerate(graph.elements)
        ]
        return ["chain", elements, _packed(codec, graph.on_error, 1)]
    if isinstance(graph, Group):
        members = [_packed(codec, each, given) for each in graph.members]
        return ["group", members, _packed(codec, graph.on_error, 1)]
    assert isinstance(graph, Chord)  # noqa: S101  # there are four kinds of graphs
    header, body = _packed(codec, graph.header, given), _packed(codec, graph.body, 1)
    return ["chord", header, body, graph.return_errors, _packed(codec, graph.on_error, 1)]


class GraphReader:
    """Reads packed graphs for one app."""

    def __init__(self, codec: Codec, tasks: Mapping[str, object]) -> None:
        self._codec = codec
        self._tasks = tasks

    def read(self, data: bytes) -> Graph:
        """The graph in these bytes.

        Raises Damaged, CodecError, and UnknownTask if the app does not have one of its tasks.
        """
        try:
            found = msgpack.unpackb(data, unicode_errors="surrogatepass")
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            raise Damaged("its workflow cannot be decoded") from None
        if not isinstance(found, list) or found[:1] != [VERSION] or len(found) < 2:
            raise Damaged("its workflow is wrong; a newer aztask may know it")
        return self._graph(found[1])

    def _graph(self, found: Any) -> Graph:
        kind = found[0] if isinstance(found, list) and found else None
        if not isinstance(kind, str) or len(found) < _FIELDS.get(kind, 100):
            raise Damaged("a part of its workflow is wrong; a newer aztask may know it")
        if kind == "task":
            return self._call(*found[1:7])
        if kind == "chord":
            header = self._graph(found[1])
            if not isinstance(header, Group):
                raise Damaged("a chord of its workflow has no group")
            return Chord(header, self._graph(found[2]), found[3] is True, self._handler(found[4]))
        if not isinstance(found[1], list):
            raise Damaged("a part of its workflow is no list")
        parts = tuple(self._graph(each) for each in found[1])
        make = Chain if kind == "chain" else Group
        return make(parts, self._handler(found[2]))

    def _handler(self, found: Any) -> Signature | None:
        handler = None if found is None else self._graph(found)
        if handler is not None and not isinstance(handler, Signature):
            raise Damaged("on_error in its workflow is no call")
        return handler

    def _call(
        self, name: Any, body: Any, content_type: Any, encoding: Any, options: Any, immutable: Any
    ) -> Signature:
        texts = (name, content_type, encoding)
        if not all(isinstance(each, str) for each in texts) or not isinstance(options, dict):
            raise Damaged("a call of its workflow is wrong")
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(
                f"this app has no task {name!r}, which the schedule's workflow calls; a worker "
                "that has it starts the workflow"
            )
        message = TaskMessage(name, name, "", body, content_type, encoding)
        args, kwargs = self._codec.decode_arguments(message)
        callee, alone = cast("Callee", task), immutable is True
        return Signature(callee, args, kwargs, options, alone, plain=True)


def later(graph: Graph, seconds: float) -> Graph:
    """The graph with the calls that start at once delayed by so many seconds."""
    if not seconds:
        return graph
    if isinstance(graph, Signature):
        return graph.with_options(delay=float(graph.options.get("delay") or 0.0) + seconds)
    if isinstance(graph, Chain):
        return replace(graph, elements=(later(graph.elements[0], seconds), *graph.elements[1:]))
    if isinstance(graph, Group):
        return replace(graph, members=tuple(later(each, seconds) for each in graph.members))
    assert isinstance(graph, Chord)  # noqa: S101  # there are four kinds of graphs
    if next(calls_of(graph.header), None) is None:
        return replace(graph, body=later(graph.body, seconds))
    return replace(graph, header=cast("Group", later(graph.header, seconds)))
