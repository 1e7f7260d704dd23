"""Dead letters for the tests that read them."""

from aztask.settlement import DeadLetter

TASK = "post.deliver"


def bury(app, queue, letters):
    """(delivery, settlement) for a dead letter of each (task id, argument, reason, description)."""
    broker, buried = app.broker, []
    for start in range(0, len(letters), 100):
        batch = letters[start : start + 100]
        for task_id, argument, *_ in batch:
            app.send(TASK, [argument], queue=queue, task_id=task_id)
        texts = {task_id: DeadLetter(*why) for task_id, _, *why in batch}
        receiver = broker.receiver(queue, lease=app.lease_seconds(queue))
        left = len(batch)
        while left:
            pairs = [(d, texts[d.envelope.headers["id"]]) for d in receiver.receive(left, 5.0)]
            receiver.settle(pairs)
            buried += pairs
            left -= len(pairs)
        receiver.close()
    return buried


def errors(count):
    """Letters of two groups, and a single one."""
    for number in range(count):
        text = (
            f"ConnectionError: no answer from 10.0.0.{number % 250}:5432 after {number} s"
            if number % 3
            else f"KeyError: 'user-{number}'"
        )
        yield f"t{number}", f"n{number}", "retries-exhausted", text
    yield "lonely", "x", "rejected", "nobody is there"
