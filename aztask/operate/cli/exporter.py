"""``aztask exporter``: serve queue depths and worker counts to Prometheus."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import click

from aztask.operate.cli.group import telemetry_module
from aztask.operate.cli.options import Duration, Listen, all_names, app_option, queues_option
from aztask.operate.cli.target import open_app
from aztask.worker.logs import FORMATS, configure
from aztask.worker.stopsignals import DRAIN, NOW, handle

logger = logging.getLogger("aztask.exporter")


@click.command("exporter")
@app_option
@queues_option("Export these queues: a,b or -Q a -Q b. [default: all queues]")
@click.option(
    "--http", type=Listen(), default="127.0.0.1:9466", help="Serve the metrics at this address."
)
@click.option(
    "--interval",
    type=Duration(least=1.0, most=3600.0),
    default="15s",
    help="Ask the service this often. On Storage queues each queue costs two requests or three.",
)
@click.option(
    "--celery-metrics",
    is_flag=True,
    help="Add the names of celery-exporter, for Grafana boards that read them.",
)
@click.option(
    "--log-format", type=click.Choice(FORMATS), default=FORMATS[0], help="Format the log on stderr."
)
def command(
    queues: Sequence[tuple[str, ...]],
    http: tuple[str, int],
    interval: float,
    celery_metrics: bool,
    log_format: str,
) -> None:
    """Serve queue depths and worker counts to Prometheus until stopped.

    Run one for all workers; needs pip install "aztask[prometheus]". The metrics of a worker come
    from the worker itself: aztask worker --http.
    """
    module = telemetry_module("exporter")
    configure(log_format)
    stopping = threading.Event()
    handle(lambda *_: stopping.set(), *DRAIN, *NOW)
    names = all_names(queues)
    with open_app() as app:
        exporting = module.exporting(
            app,
            lambda: names or app.broker.listing().queues,
            http,
            interval=interval,
            celery_names=celery_metrics,
        )
        with exporting as url:
            logger.info("metrics of the queues at %s/metrics, asked for every %g s", url, interval)
            stopping.wait()
