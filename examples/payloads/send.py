"""Sends 20 MB as an argument, and a value that is stored once."""

from images import app, count, shrink

table = app.put({f"word-{number}": number for number in range(100_000)})
shrunk = shrink.with_options(task_id="shrink").delay(b"x" * 20_000_000)
looked_up = count.with_options(task_id="count").delay(table, "word-7")
print(f"sent {shrunk.id} and {looked_up.id}")
