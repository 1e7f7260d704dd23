"""``aztask dashboard``: the operations page, in a browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from aztask.errors import ConfigurationError
from aztask.operate.cli.group import extra_module
from aztask.operate.cli.options import Duration, Listen, Text, all_names, app_option, queues_option
from aztask.operate.cli.target import open_app
from aztask.operate.requests import Role
from aztask.support.display import Secret

ROLES = ("read", "act", "configure")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
ENTRA_SECRET: Final = "AZTASK_DASHBOARD_ENTRA_SECRET"  # noqa: S105  # the name of a variable


@click.command("dashboard")
@app_option
@queues_option("Show these queues: a,b or -Q a -Q b. [default: all queues]")
@click.option("--http", type=Listen(), default="127.0.0.1:9467", help="Serve at this address.")
@click.option(
    "--socket", type=click.Path(path_type=Path), help="Serve on this Unix socket instead."
)
@click.option(
    "--host",
    "hosts",
    type=Text(),
    multiple=True,
    help="Answer to this host name too, as browsers or a proxy send it; repeatable.",
)
@click.option("--password-file", type=FILE, help="Log in people of this file: NAME:ROLE:HASH.")
@click.option(
    "--hash-password",
    is_flag=True,
    help="Ask for a password, print the hash for the password file, and exit.",
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="read",
    help="Without a password file: the role of the person with the link.",
)
@click.option(
    "--values-role",
    type=click.Choice(ROLES),
    default="act",
    help="Show arguments, results and checkpoints from this role on.",
)
@click.option("--proxy-header", type=Text(), help="The header in which a proxy sends the name.")
@click.option(
    "--proxy-peer",
    "proxy_peers",
    type=Text(),
    multiple=True,
    help="The proxy's IP address; repeatable. Not needed with --socket.",
)
@click.option(
    "--proxy-secret-file",
    type=FILE,
    help="The secret that the proxy sends in X-Aztask-Proxy-Secret.",
)
@click.option(
    "--proxy-role",
    type=click.Choice((*ROLES, "none")),
    default="read",
    help="The role of people whom the proxy names and the password file does not.",
)
@click.option(
    "--entra-tenant", type=Text(), help="Log in people of this Entra ID tenant (its ID, a GUID)."
)
@click.option(
    "--entra-client", type=Text(), help="The ID of this dashboard's app registration there."
)
@click.option(
    "--entra-secret-file",
    type=FILE,
    help=f"Its client secret; without this option it is read from {ENTRA_SECRET}.",
)
@click.option(
    "--entra-role",
    "entra_roles",
    type=Text(),
    multiple=True,
    help="What an app role means, such as Operators=act; repeatable. "
    "[default: read=read act=act configure=configure]",
)
@click.option(
    "--entra-authority",
    type=Text(),
    default="https://login.microsoftonline.com",
    help="The Entra ID of another cloud.",
)
@click.option(
    "--interval",
    type=Duration(least=1.0, most=300.0),
    default="5s",
    help="Open pages read their figures again this often.",
)
def command(
    queues: Sequence[tuple[str, ...]],
    http: tuple[str, int],
    socket: Path | None,
    hosts: tuple[str, ...],
    password_file: Path | None,
    hash_password: bool,
    role: str,
    values_role: str,
    proxy_header: str | None,
    proxy_peers: tuple[str, ...],
    proxy_secret_file: Path | None,
    proxy_role: str,
    interval: float,
    **entra: Any,
) -> None:
    """Serve the operations page in a browser until stopped.

    Needs pip install "aztask[dashboard]", and "aztask[dashboard,identity]" for Entra ID. Without a
    password file, Entra ID and a proxy it listens on this machine only, and prints a link with a
    key that is made anew at each start.
    """
    access = extra_module("aztask.dashboard.access", "aztask dashboard", "dashboard")
    if hash_password:
        click.echo(access.hash_password(_asked()))
        return
    server = extra_module("aztask.dashboard.server", "aztask dashboard", "dashboard")
    site = extra_module("aztask.dashboard.site", "aztask dashboard", "dashboard")
    listening = server.Listening(*http, socket, hosts)
    by_entra = _entra(server, **entra)
    who = server.access_of(
        listening,
        password_file=password_file,
        link_role=role,
        proxy_header=proxy_header,
        proxy_peers=proxy_peers,
        proxy_secret=proxy_secret_file,
        proxy_role=proxy_role,
        entra=by_entra is not None,
    )
    with open_app(reads=True) as app:
        shown = site.Site(app, all_names(queues), Role.named(values_role))
        listening, sockets = server.bound(listening)
        where = f"{socket}, path " if sockets is None else f"http://{sockets.address}"
        if who.link_role is not None:
            where += f"/login?key={who.link_key.reveal()}"
        click.echo(f"aztask: the operations page: {where}", err=True)
        server.serve(server.Dashboard(shown, who, interval, by_entra), listening, sockets)


def _entra(
    server: Any,
    *,
    entra_tenant: str | None,
    entra_client: str | None,
    entra_secret_file: Path | None,
    entra_roles: Sequence[str],
    entra_authority: str,
) -> Any:
    """The login with Entra ID; None without its options."""
    if not (entra_tenant or entra_client or entra_secret_file or entra_roles):
        return None
    if not (entra_tenant and entra_client):
        raise click.UsageError("Entra ID needs --entra-tenant and --entra-client")
    if entra_secret_file is not None:
        secret = server.secret_in(entra_secret_file)
    elif text := os.environ.get(ENTRA_SECRET, ""):
        secret = Secret(text)
    else:
        raise ConfigurationError(
            f"Entra ID needs a client secret: set {ENTRA_SECRET}, or give --entra-secret-file"
        )
    module = extra_module("aztask.dashboard.entra", "--entra-tenant", "identity")
    given: dict[str, Any] = {"authority": entra_authority.rstrip("/")}
    if entra_roles:
        given["roles"] = dict(map(_role, entra_roles))
    return module.EntraLogin(module.EntraSettings(entra_tenant, entra_client, secret, **given))


def _role(text: str) -> tuple[str, Role]:
    value, equals, role = text.rpartition("=")
    if not (value and equals):
        raise click.UsageError(
            f"--entra-role needs APP ROLE=ROLE, such as Operators=act, and not {text!r}"
        )
    return value, Role.named(role)


def _asked() -> str:
    """A password from the terminal, or the first line of stdin."""
    if sys.stdin is not None and sys.stdin.isatty():
        password: str = click.prompt(
            "Password", hide_input=True, confirmation_prompt=True, err=True
        )
    else:
        password = (sys.stdin.readline() if sys.stdin is not None else "").rstrip("\n")
    if len(password) < 8:
        raise ConfigurationError("a password needs at least 8 characters")
    return password
