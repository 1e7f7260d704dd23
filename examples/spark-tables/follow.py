"""Adds the new event files to the table, in this process. With a Spark session, executors do it."""

from aztask.spark import follow_events, place_of

for batch in follow_events(None, place_of("events"), place_of("tables"), available_now=True):
    print(f"{batch.files} files added to the tables ({batch.rows} events)")
