"""How orders ended, from the table of events: read without Spark and without aztask."""

from deltalake import DeltaTable

table = DeltaTable("tables/events").to_pyarrow_table(columns=["id", "date", "event"])
# An event may be in two files, with one id: then it counts once.
once = table.group_by(["id", "date", "event"]).aggregate([])
counted = once.group_by(["date", "event"]).aggregate([("id", "count")])
for row in counted.sort_by("event").to_pylist():
    print(f"{row['date']} {row['event']:<16}{row['id_count']:>6}")
