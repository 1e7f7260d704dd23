"""Signatures and graphs are frozen values that combine, and that print as trees."""

import dataclasses

import pytest
from graphinterpreter import FakeTask

from aztask.errors import ConfigurationError
from aztask.workflows.graphs import Chain, Chord, Group, Signature, chain, chord, group

A, B, C = FakeTask("shop.a"), FakeTask("shop.b"), FakeTask("shop.c")


def test_a_signature_is_frozen_and_keeps_its_own_copy():
    kwargs = {"width": 200}
    signature = Signature(A, (1,), kwargs)
    kwargs["width"] = 3
    assert signature.kwargs == {"width": 200}
    with pytest.raises(dataclasses.FrozenInstanceError):
        signature.args = ()
    with pytest.raises(TypeError):
        signature.kwargs["width"] = 5


def test_options_make_a_new_signature():
    signature = A.s(1)
    later = signature.with_options(delay=5, queue="slow").with_options(delay=6)
    assert (signature.options, later.options) == ({}, {"delay": 6, "queue": "slow"})
    assert later == A.s(1).with_options(queue="slow", delay=6)


def test_an_unknown_option_is_refused_with_a_proposal():
    with pytest.raises(ConfigurationError, match=r"no option 'dely'.*delay"):
        A.s(1).with_options(dely=5)
    with pytest.raises(ConfigurationError, match="task_id"):
        A.s(1).with_options(task_id="x")


def test_the_pipe_makes_flat_chains():
    graph = A.s(1) | B.s() | group(A.s(), B.s()) | C.s()
    assert isinstance(graph, Chain)
    assert [type(each) for each in graph.elements] == [Signature, Signature, Group, Signature]
    assert graph == chain(A.s(1), B.s(), group(A.s(), B.s()), C.s())
    assert (A.s(1) | chain(B.s(), C.s())) == chain(A.s(1), B.s(), C.s())
    guarded = chain(B.s(), on_error=C.s())
    assert (A.s(1) | guarded).elements == (A.s(1), guarded)
    with pytest.raises(TypeError):
        A.s(1) | 5


def test_groups_take_members_or_one_iterable():
    assert group(A.s(1), B.s(2)) == group([A.s(1), B.s(2)]) == group(iter((A.s(1), B.s(2))))
    assert group() == group([]) == Group(())
    assert group(A.s(1)) == Group((A.s(1),))
    assert chord(group(A.s(1)), B.s()) == chord([A.s(1)], B.s()) == Chord(Group((A.s(1),)), B.s())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (chain, "at least one"),
        (lambda: chain(A.s(1), print), "write task.s"),
        (lambda: group(5), "not 5"),
        (lambda: group(A.s(1), "b"), "not 'b'"),
        (lambda: chord([A.s(1)], None), "chord takes signatures"),
        (lambda: chord([A.s(1)], B.s(), return_errors="yes"), "True or False"),
        (lambda: chain(A.s(1), on_error=A), "on_error takes a signature"),
    ],
)
def test_what_is_no_graph_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_graph_prints_as_a_tree():
    pages = [A.s(number) for number in range(100)]
    graph = chain(
        A.s("order-1", {"size": 5}),
        chord(pages, B.s().with_options(queue="slow"), return_errors=True, on_error=C.s()),
        group(A.s(1), chain(B.s(), C.s())),
    )
    assert str(graph) == "\n".join(
        [
            "chain",
            "├ shop.a('order-1', {'size': 5})",
            "├ chord of 100, errors are passed on",
            "│ ├ shop.a(0)",
            "│ ├ shop.a(1)",
            "│ ├ shop.a(2)",
            "│ ├ ... 96 more",
            "│ ├ shop.a(99)",
            "│ ├ then shop.b() [queue='slow']",
            "│ └ on error shop.c()",
            "└ group of 2",
            "  ├ shop.a(1)",
            "  └ chain",
            "    ├ shop.b()",
            "    └ shop.c()",
        ]
    )
    assert len(str(Signature(A, ("x" * 500, "\n"), {"key": 1}))) < 80
