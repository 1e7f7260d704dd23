"""``aztask workflow``: list workflows, show one as a tree, cancel it, or resume it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from aztask.operate.cli.failures import CommandFailed
from aztask.operate.cli.group import CliGroup
from aztask.operate.cli.options import Text, app_option, json_option
from aztask.operate.cli.output import STATE_COLOURS, iso_time, print_json, print_table
from aztask.operate.cli.target import open_app
from aztask.operate.workflows import (
    STATES,
    NodeView,
    WorkflowShown,
    WorkflowView,
    cancel,
    members_first_failed,
    resume,
    shown,
    workflow,
    workflows,
)
from aztask.support.display import visible
from aztask.support.durations import fine_span, span
from aztask.workflows.graphs import Drawing, Part, draw

SHOWN: Final = 8
"""Members of a group that the tree shows; the failed ones come first."""

WATCH_SECONDS: Final = 1.0


@click.group("workflow", cls=CliGroup)
@app_option
def command() -> None:
    """List, show, cancel and resume workflows."""


@command.command("list")
@app_option
@click.option("--state", type=click.Choice(STATES), help="Only workflows in this state.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, help="List at most this many workflows."
)
@json_option
def list_(state: str | None, limit: int, as_json: bool) -> None:
    """List workflows: open ones first, then those that have ended, the newest first.

    Those of another app on the same result store are listed as foreign, with their owner.
    """
    with open_app(reads=True) as app:
        found = workflows(app, limit, state)
    if as_json:
        for each in found:
            print_json(_described(each))
        return
    print_table(["id", "state", "tasks", "for", "note"], [_row(each) for each in found])


def _row(found: WorkflowShown) -> list[object]:
    root = found.root
    if root is None:
        note = found.damage or f"belongs to {found.owner}"
        return [found.id, found.state, "", "", note]
    seconds = (root.ended_at or time.time()) - root.at
    return [found.id, found.state, root.tasks, span(seconds), ""]


@command.command("show")
@app_option
@click.argument("workflow_id", type=Text(), metavar="ID")
@click.option("--watch", is_flag=True, help="Draw the tree anew each second until it has ended.")
@json_option
def show(workflow_id: str, watch: bool, as_json: bool) -> None:
    """Show a workflow as a tree, with the state and the time of each task.

    A task that no worker has started is shown as waiting in its queue, or as not sent.
    Large groups are shortened: failed members come first. --json prints every task on a line.
    """
    with open_app(reads=True) as app:
        found = workflow(app, workflow_id)
        while watch and not as_json and found.root.ended_at is None:
            click.clear()
            _print_tree(found)
            time.sleep(WATCH_SECONDS)
            found = workflow(app, workflow_id)
    if as_json:
        print_json(_described(shown(workflow_id, found.root)))
        for node in found.all_nodes():
            if node.task:
                print_json(_described_node(node))
    else:
        _print_tree(found)


@command.command("cancel")
@app_option
@click.argument("workflow_id", type=Text(), metavar="ID")
def cancel_(workflow_id: str) -> None:
    """Cancel a workflow: no further task of it starts. Running tasks end."""
    with open_app() as app:
        if not cancel(app, workflow_id).act():
            raise CommandFailed(f"not cancelled, since already ended: {visible(workflow_id)}")
        click.echo(f"{visible(workflow_id)} is cancelled")


@command.command("resume")
@app_option
@click.argument("workflow_id", type=Text(), metavar="ID")
def resume_(workflow_id: str) -> None:
    """Run the tasks of a workflow again that did not succeed. It goes on behind each that does now.

    Dead-lettered tasks are replayed. Those that were cancelled, that expired or that were lost with
    their worker are sent again, and a cancelled workflow goes on.
    What a body was given before does not change: if the workflow has succeeded, a replay changes
    only the results of its own tasks.
    """
    with open_app() as app:
        action = resume(app, workflow_id)
        done = action.act()
    click.echo(f"resumed {done} task{'' if done == 1 else 's'} of {visible(workflow_id)}")
    if action.succeeded:
        click.echo("the workflow has succeeded: what its bodies were given does not change")


# -- the tree --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Branch:
    """Nodes that run one after the other, as a part of the tree, and their handler of errors."""

    nodes: Sequence[NodeView]
    handler: NodeView | None = None

    def drawn(self) -> Drawing:
        """One node as itself; several, or one with a handler, as a chain."""
        if len(self.nodes) == 1 and self.handler is None:
            return _drawn(self.nodes[0])
        return "chain", [*[("", _Branch([node])) for node in self.nodes], *_handled(self.handler)]


def _handled(handler: NodeView | None) -> list[Part]:
    return [] if handler is None else [("on error ", _Branch([handler]))]


def _drawn(node: NodeView) -> Drawing:
    if node.task:
        return _line(node), ()
    members = members_first_failed(node)
    parts: list[Part] = [("", _Branch(member)) for member in members]
    if len(parts) > SHOWN:
        parts = [*parts[:SHOWN], (f"... {len(parts) - SHOWN:,} more", None)]
    parts += _handled(node.handler)
    return f"group of {len(node.members)}{_state(node)}", parts


def _line(node: NodeView) -> str:
    text = f"{visible(node.task)}  {visible(node.task_id)}{_state(node)}"
    if node.started_at is not None and node.ended_at is not None:
        text += f" in {fine_span(node.ended_at - node.started_at)}"
    if node.failure is not None and node.failure.error_type:
        text += f": {visible(node.failure.error_type)}: {visible(node.failure.error[:100])}"
    return text


def _state(node: NodeView) -> str:
    if node.state is None:
        return f"  {click.style(visible(node.waits), dim=True)}" if node.waits else ""
    return "  " + click.style(node.state.value, fg=STATE_COLOURS.get(node.state.value))


def _print_tree(found: WorkflowView) -> None:
    root = found.root
    seconds = (root.ended_at or time.time()) - root.at
    click.echo(f"{visible(found.workflow)}: {root.state.value}, {span(seconds)}")
    click.echo(draw(_Branch(found.nodes, found.handler)))


def _described(found: WorkflowShown) -> dict[str, Any]:
    root = found.root
    if root is None:
        more = {"owner": found.owner} if found.owner else {"damage": found.damage}
        return {"id": found.id, "state": found.state, **more}
    return {
        "id": found.id,
        "state": root.state.value,
        "tasks": root.tasks,
        "started_at": iso_time(root.at),
        "ended_at": None if root.ended_at is None else iso_time(root.ended_at),
        "cancelled": root.cancelled_at is not None,
    }


def _described_node(node: NodeView) -> dict[str, Any]:
    failure = node.failure
    return {
        "task_id": node.task_id,
        "task": node.task,
        "queue": node.queue,
        "state": None if node.state is None else node.state.value,
        "waits": node.waits or None,
        "started_at": None if node.started_at is None else iso_time(node.started_at),
        "ended_at": None if node.ended_at is None else iso_time(node.ended_at),
        "error_type": "" if failure is None else failure.error_type,
        "error": "" if failure is None else failure.error,
    }
