"""``aztask mcp``: the operations layer for agents."""

from __future__ import annotations

from pathlib import Path

import click

from aztask.operate.cli.group import extra_module
from aztask.operate.cli.options import Listen, Text, app_option
from aztask.operate.cli.target import open_app
from aztask.operate.requests import Role
from aztask.support.listen import bind

ROLES = ("read", "act", "configure")


@click.command("mcp")
@app_option
@click.option(
    "--http", type=Listen(), help="Serve at this address, with tokens, instead of stdin and stdout."
)
@click.option(
    "--host",
    "hosts",
    type=Text(),
    multiple=True,
    help="Answer to this host name too, as clients or a proxy send it; repeatable.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --http: the callers, in lines of NAME:ROLE:HASH.",
)
@click.option(
    "--new-token", is_flag=True, help="Print a new token and its hash for the token file, and exit."
)
@click.option(
    "--allow-actions",
    is_flag=True,
    help="Offer the actions too: replay, cancel, pause and others. Each is counted first.",
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="read",
    help="On stdin and stdout: the role of the program that started this one.",
)
@click.option(
    "--values-role",
    type=click.Choice(ROLES),
    default="act",
    help="Show arguments, results and checkpoints from this role on.",
)
def command(
    http: tuple[str, int] | None,
    hosts: tuple[str, ...],
    token_file: Path | None,
    new_token: bool,
    allow_actions: bool,
    role: str,
    values_role: str,
) -> None:
    """Serve queries, and actions if you allow them, to agents over MCP.

    Needs pip install "aztask[mcp]". Without --http it speaks on stdin and stdout, to the program
    that starts it.
    """
    module = extra_module("aztask.agents.server", "aztask mcp", "mcp")
    if new_token:
        token, digest = module.new_token()
        click.echo(f"token: {token}\nline:  NAME:ROLE:{digest}")
        return
    if http is not None and token_file is None:
        raise click.UsageError("--http needs --token-file; make a token with --new-token")
    if http is None and (token_file is not None or hosts):
        raise click.UsageError("--token-file and --host need --http")
    with open_app(reads=not allow_actions) as app:
        local = module.Caller("", Role.named(role)) if http is None else None
        agents = module.Agents(app, allow_actions, Role.named(values_role), local)
        if http is None:
            module.serve_stdio(agents)
            return
        callers = module.read_tokens(token_file)
        sockets = bind(*http)
        click.echo(f"aztask: agents at http://{sockets.address}/mcp", err=True)
        module.serve_http(agents, callers, sockets, hosts)
