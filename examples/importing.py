"""Import files page by page, without tasks and without a worker.

Each message names a file. The loop below holds one message at a time and stores its page in the
message, so that the next receiver goes on from there:

* `lease.update` stores the page and renews the lease: a checkpoint;
* a file that is not ready yet is sent again for later with `lease.resubmit`;
* a file that can never be imported goes to the dead letters with a reason;
* Ctrl-C, a time limit or an error gives the message back.

Run it::

    python importing.py send 3      # send three files
    python importing.py             # import them, several at a time
"""

import asyncio
import json
import sys

from aztask import App
from aztask.message.envelope import Envelope

QUEUE = "imports"
PAGES = 4
AT_A_TIME = 2

app = App("importing", broker="local://")


async def import_file() -> None:
    """Receive one message and import its file from the page that it has reached."""
    async with app.areceive(QUEUE, wait=1.0, lease=30.0) as lease:
        job = json.loads(lease.body)
        if job["page"] == 0 and not job.get("waited"):
            await lease.resubmit(delay=0.2, body=json.dumps({**job, "waited": True}).encode())
            return
        if job["page"] > PAGES:
            await lease.dead_letter("no-such-page", f"{job['file']} has {PAGES} pages")
            return
        while job["page"] < PAGES:
            await asyncio.sleep(0.01)  # import the page here
            job["page"] += 1
            await lease.update(json.dumps(job).encode())
        await lease.complete()
        print(f"imported {job['file']}: {job['page']} pages")


async def import_all() -> None:
    """Import until the queue has been empty for a second."""

    async def keep_on() -> None:
        while True:
            try:
                await import_file()
            except LookupError:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(keep_on())


def send(files: int) -> None:
    """Send this many files, and one that is broken."""
    app.broker.declare(QUEUE)
    jobs = [{"file": f"{number}.csv", "page": 0} for number in range(files)]
    jobs.append({"file": "broken.csv", "page": PAGES + 1})
    app.broker.send(QUEUE, [Envelope(json.dumps(job).encode()) for job in jobs])


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        send(int(sys.argv[2]))
    else:
        asyncio.run(import_all())
    app.close()
