"""Shows that no second had more than 10 starts, and no customer more than 2 calls at a time."""

from calls import app

began: dict[str, list[float]] = {}
for customer in ("acme", "globex", "initech"):
    results = [app.result(f"{customer}-{page}") for page in range(10)]
    began[customer] = sorted(result.get(timeout=1) for result in results)

starts = sorted(at for times in began.values() for at in times)
most = max(sum(at <= other < at + 1.0 for other in starts) for at in starts)
print(f"{len(starts)} calls, at most {most} starts in a second")
for customer, times in began.items():
    together = max(sum(at <= other < at + 0.3 for other in times) for at in times)
    print(f"{customer}: at most {together} at a time")
