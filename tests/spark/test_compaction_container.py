"""A blob container is read and compacted like a directory."""

import logging
import os
import random

from azurite import KEY
from events_site import random_event, write_log

from aztask.azure.container import container_client
from aztask.spark import compact, place_of, read_events

NOW = 2_000_000_000.0
SIZE = 2000


def test_events_in_a_container_are_read_and_compacted(spark, tmp_path, blobs, caplog, capfd):
    """Through azure-storage-blob, by driver and executors; no option and no log has the secret."""
    caplog.set_level(logging.DEBUG)
    draw, log = random.Random(3), tmp_path / "log"
    write_log(log, [random_event(draw, number) for number in range(SIZE)])
    with container_client(place_of("events/log", blobs).address()) as client:
        client.create_container()
        for path in log.glob("date=*/hour=*/*.jsonl"):
            name = f"log/{path.relative_to(log).as_posix()}"
            client.upload_blob(name, path.read_bytes())
    read = read_events(spark, "events/log", account_variable=blobs)
    assert read.counts.events == SIZE
    lines_only = read.events.orderBy("id").collect()
    place = place_of("events/log", blobs)
    report = compact(spark, place, now=NOW)
    assert report.events == SIZE
    assert report.compacted_files == 3
    assert [file.compacted for file in place.list().files] == [True] * 3
    after = read_events(spark, "events/log", account_variable=blobs)
    assert after.events.orderBy("id").collect() == lines_only
    assert after.counts.compacted_files == 3
    plan = after.events._jdf.queryExecution().toString()
    shown = [plan, str(spark.sparkContext.getConf().getAll()), caplog.text, *capfd.readouterr()]
    assert "PUT" in caplog.text  # the requests are in the log, so it would show a key
    for text in shown:
        assert os.environ[blobs] not in text
        assert KEY not in text
        assert "AccountKey" not in text
