"""A table becomes tasks, and their results become a table: two assets of Dagster.

It needs the variable SHOP, the folder of the app and the table. Dagster itself needs neither aztask
nor Spark: AZTASK names the program of an environment that has both.
"""

import os
import subprocess

from dagster import AssetExecutionContext, Definitions, MaterializeResult, RetryPolicy, asset

SHOP = os.environ["SHOP"]
AZTASK = os.environ.get("AZTASK", "aztask")
TRIES = RetryPolicy(max_retries=3, delay=60)


def spark(*arguments: str) -> str:
    """Run a command of the data pipeline, whose log shows in Dagster; returns its output."""
    command = [AZTASK, "spark", *arguments, "-A", "shop", "--json"]
    ended = subprocess.run(command, cwd=SHOP, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return ended.stdout


@asset(retry_policy=TRIES)
def submitted(context: AssetExecutionContext) -> MaterializeResult:
    """The tasks, one for each image. Another try of the run sends none of them twice."""
    report = spark(
        *("submit", "--input", "images.csv", "--key", "path", "--columns", "path,width"),
        *("--schema", "path STRING, width INT, owner STRING", "--task", "shop.thumbnail"),
        *("--submission-id", f"images-{context.run_id}", "--manifest", "manifests"),
    )
    return MaterializeResult(metadata={"report": report})


@asset(deps=[submitted], retry_policy=TRIES)
def thumbnails(context: AssetExecutionContext) -> MaterializeResult:
    """Their results. Each try has its folder: one that was killed leaves half a table."""
    folder = f"thumbnails/{context.run_id}/{context.retry_number}"
    counts = spark(
        *("results", "--submission-id", f"images-{context.run_id}", "--manifest", "manifests"),
        *("--wait", "1h", "-o", folder),
    )
    return MaterializeResult(metadata={"folder": folder, "tasks": counts})


definitions = Definitions(assets=[submitted, thumbnails])
