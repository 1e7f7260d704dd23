"""Shows the results of the tasks that send.py sent."""

from images import app

small = app.result("shrink").get(timeout=10)
print(f"20,000,000 bytes became {len(small):,}")
print(f"word-7 is {app.result('count').get(timeout=10)}")
