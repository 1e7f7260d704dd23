"""``aztask spark pack``: one zip of all Python code that executors lack."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from aztask.operate.cli.options import app_option, json_option
from aztask.operate.cli.output import print_json
from aztask.operate.cli.target import app_spec
from aztask.spark.packing import pack
from aztask.support.display import visible


@click.command("pack")
@app_option
@click.argument("sources", metavar="[MODULE|FILE|FOLDER|WHEEL]...", nargs=-1)
@click.option("-o", "--output", required=True, help="The zip to write.")
@json_option
def command(sources: tuple[str, ...], output: str, as_json: bool) -> None:
    """Pack aztask, its needs and your modules into a zip for --py-files.

    The app of -A is packed with its module or package. Each further argument is a module, a .py
    file, a package's folder or a wheel. Neither Spark nor Java is needed. Packages with compiled
    parts do not work from a zip: they are listed, so that you can install them on the cluster.
    """
    spec = app_spec()
    given = (spec.partition(":")[0].partition(".")[0],) if spec else ()
    packed = pack(output, (*given, *sources))
    if as_json:
        print_json(asdict(packed))
        return
    _print(packed)


def _print(packed: Any) -> None:
    click.echo(
        f"{visible(packed.path)} ({packed.bytes / 1e6:,.1f} MB): {visible(', '.join(packed.parts))}"
    )
    if packed.to_install:
        click.echo(f"install on the machines of the cluster: {', '.join(packed.to_install)}")
