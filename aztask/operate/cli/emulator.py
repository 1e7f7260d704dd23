"""``aztask emulator``: run a local Service Bus until it is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from aztask.emulator.broker.entities import Tier
from aztask.emulator.broker.entra import EntraTokens, parse_grants, read_keys
from aztask.emulator.config import ADMIN_PORT, AMQP_PORT, AMQPS_PORT, Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.faults import parse_faults
from aztask.emulator.view import LatestWriter, tracer, view_of
from aztask.errors import ConfigurationError
from aztask.support.display import mask, printable
from aztask.support.durations import LONGEST_SECONDS, parse_duration
from aztask.support.garbage import collect_rarely

REFRESH_SECONDS = 1.0
SPARE = 100  # the view takes at most 1/100 of the emulator's time
NAMESPACE = "servicebus://emulator"
"""Any name will do: AZTASK_SERVICEBUS_ENDPOINT says where clients connect to."""
_KEY_OPTION = "shared_access_key"
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def _offset(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """The seconds that ``1h`` or ``-30s`` stand for."""
    text = value.strip()
    sign = -1.0 if text.startswith("-") else 1.0
    try:
        seconds = parse_duration(text.lstrip("+-"))
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    if seconds > LONGEST_SECONDS:
        raise click.BadParameter(f"{printable(text, 40)} is more than ten years; check the unit")
    return sign * seconds


@click.command("emulator")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Serve AMQP on this port; 0: any free port. [default: 5672, with --tls 5671]",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    default=ADMIN_PORT,
    help="Serve administration and messages over HTTP on this port; 0: any free port.",
)
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep queues and messages in this file. [default: in memory]",
)
@click.option(
    "--queue", "queues", multiple=True, help="Create this queue if it is missing; repeatable."
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Create the queues and topics of this file, in the official emulator's JSON format.",
)
@click.option(
    "--host", default="127.0.0.1", help="Listen on this address; any but loopback needs a key."
)
@click.option(
    "--shared-access-key",
    show_envvar=True,
    help="Verify clients' signatures with this key; set it in the environment only.",
)
@click.option(
    "--clock-offset",
    default="0s",
    callback=_offset,
    help="Run the emulator's clock ahead (1h) or behind (-1h).",
)
@click.option(
    "--tls", is_flag=True, help="Serve TLS with a certificate that the first start makes."
)
@click.option(
    "--certificate-dir",
    "certificate",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the certificate in this directory. [default: a temporary one]",
)
@click.option(
    "--entra-keys",
    "keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Verify tokens of Entra ID with the keys of this file, a JWKS document; needs --tls.",
)
@click.option(
    "--entra-grant",
    "grants",
    multiple=True,
    metavar="IDENTITY=MAY",
    help="Let the identity with this oid (else appid) do this: send, listen, manage, with commas"
    " between them; repeatable.",
)
@click.option(
    "--tier",
    type=click.Choice([each.value.lower() for each in Tier]),
    help="Have the limits of this tier: locks of 5 s and more, messages of 256 KB or 1 MiB.",
)
@click.option(
    "--busy",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Refuse this share of sends and management requests with server-busy, such as 0.1.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    help="Break something on purpose: drop=0.01, latency=50ms, restart=30s or idle=30s;"
    " repeatable.",
)
@click.option(
    "--show-key",
    is_flag=True,
    help="Print the key that clients must use; without it, **** stands for it.",
)
@click.option("--trace", is_flag=True, help="Print every AMQP frame on stderr.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON lines: first ready, then the message counts.",
)
@click.pass_context
def command(
    context: click.Context, /, trace: bool, as_json: bool, show_key: bool, **options: Any
) -> None:
    """Run a local Service Bus for development and tests.

    Prints connection strings for any Service Bus SDK: one for messages, and one for administration.
    It runs until Ctrl-C or SIGTERM.
    """
    if context.get_parameter_source(_KEY_OPTION) is ParameterSource.COMMANDLINE:
        raise click.UsageError(
            "other processes can read the command line: set the key as"
            " AZTASK_EMULATOR_SHARED_ACCESS_KEY in the environment"
        )
    data, port = options.pop("data"), options.pop("port")
    if port is None:
        port = AMQPS_PORT if options["tls"] else AMQP_PORT
    options["entra"] = _entra(options.pop("keys"), options.pop("grants"), tls=options["tls"])
    tier = options.pop("tier")
    options["faults"] = parse_faults(options["faults"], options.pop("busy"))
    options["tier"] = Tier(tier.capitalize()) if tier else None
    settings = Options(data=str(data) if data else None, port=port, **options)
    writer = tracer(lambda line: click.echo(line, err=True)) if trace else None
    emulator = Emulator(settings, trace=writer)
    asyncio.run(_run(emulator, as_json=as_json, show_key=show_key))


def _entra(keys: Path | None, grants: tuple[str, ...], *, tls: bool) -> EntraTokens | None:
    """What verifies tokens; None without these options. Raises UsageError, ConfigurationError."""
    if keys is None:
        if grants:
            raise click.UsageError(
                "--entra-grant says what an identity may do, and nothing verifies its tokens: give"
                " --entra-keys FILE"
            )
        return None
    if not grants:
        raise click.UsageError(
            "--entra-keys verifies tokens, and no identity may do anything: give --entra-grant"
            " IDENTITY=send,listen"
        )
    if not tls:
        raise click.UsageError("SDKs send tokens of Entra ID over TLS only: add --tls")
    return EntraTokens(read_keys(keys), parse_grants(grants))


async def _run(emulator: Emulator, *, as_json: bool, show_key: bool) -> None:
    """Serve until a signal arrives, then stop cleanly."""
    collect_rarely()
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    try:
        try:
            await emulator.start()
        except OSError as error:
            options = emulator.options
            raise ConfigurationError(
                f"cannot listen on {options.host}, ports {options.port} and"
                f" {options.admin_port}: {os.strerror(error.errno or 0)}; choose others with"
                " --port and --admin-port"
            ) from error
        record = _ready(emulator, show_key=show_key)
        click.echo(json.dumps(record) if as_json else _in_words(emulator, record))
        await _show(emulator, stopped, None if as_json else _in_words(emulator, record))
    finally:
        await emulator.stop()


def _ready(emulator: Emulator, *, show_key: bool) -> dict[str, Any]:
    """The first line of ``--json``. A key that clients must use is shown only if you ask for it."""
    options = emulator.options
    shown: list[str | None] = [emulator.connection_string(), emulator.admin_connection_string()]
    if options.shared_access_key and not show_key:
        shown = [mask(each) for each in shown if each]
    if options.entra and not options.shared_access_key:
        shown = [None, None]  # only tokens count
    return {
        "event": "ready",
        "connection_string": shown[0],
        "admin_connection_string": shown[1],
        "namespace": NAMESPACE if options.entra else None,
        "endpoint": f"localhost:{emulator.port}" if options.entra else None,
        "host": options.host,
        "port": emulator.port,
        "admin_port": emulator.admin_port,
        "data": options.data,
        "certificate": str(emulator.certificate) if emulator.certificate else None,
    }


def _in_words(emulator: Emulator, record: dict[str, Any]) -> str:
    if record["namespace"]:
        lines = [
            f"AZTASK_BROKER='{record['namespace']}'",
            f"AZTASK_SERVICEBUS_ENDPOINT='{record['endpoint']}'",
        ]
        if record["connection_string"]:
            lines.append(f"with the key: AZTASK_BROKER='{record['connection_string']}'")
    else:
        lines = [
            f"AZTASK_BROKER='{record['connection_string']}'",
            f"AZTASK_SERVICEBUS_ADMIN='{record['admin_connection_string']}'",
        ]
    if record["connection_string"] not in (None, emulator.connection_string()):
        lines.append("**** stands for the key that you gave the emulator; --show-key prints it")
    if emulator.certificate:
        lines.append(f"clients must trust this certificate: {emulator.certificate}")
    return "\n".join(lines)


async def _show(emulator: Emulator, stopped: asyncio.Event, head: str | None) -> None:
    """Show the message counts until stopped, live on a terminal below `head`, or as JSON lines.

    head: None for JSON lines.

    Programs often read the first line only. Clients are served on although the pipe is full then.
    """
    live = sys.stdout.isatty() and head is not None
    if not live and head is not None:
        await stopped.wait()
        return
    output = LatestWriter(sys.stdout.fileno())
    last = None
    while not stopped.is_set():
        started = time.perf_counter()
        view = view_of(emulator.broker, emulator.server.endpoints)
        if head is None and view != last:
            output.write(json.dumps(view.record()) + "\n")
        elif live:
            height = shutil.get_terminal_size().lines - 4
            text = "\n".join([head or "", "", *view.lines(height)])
            output.write(_HOME_AND_CLEAR + text + "\n")
        last = view
        try:
            spent = time.perf_counter() - started  # counting a million messages takes a while
            await asyncio.wait_for(stopped.wait(), max(REFRESH_SECONDS, SPARE * spent))
        except TimeoutError:
            continue
    output.close()
