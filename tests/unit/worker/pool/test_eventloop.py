"""The event loop of a pool process: one for all slots, whatever coroutines do to it."""

import asyncio
import signal
import sys
import threading
import time

import pytest

from aztask.errors import TaskStopped, TimeLimitExceeded
from aztask.worker.pool.eventloop import EventLoop
from aztask.worker.pool.interrupt import SIGNAL, InterruptSlot, MainThread
from aztask.worker.pool.loopwatch import LIBRARIES, LONGEST_STEP, LoopWatch, line_of
from aztask.worker.pool.packets import Packets, socket_pair

PATIENCE = 10.0


@pytest.fixture
def loop():
    before = signal.getsignal(SIGNAL)
    made = EventLoop(MainThread())
    yield made
    made.loop.close()
    asyncio.set_event_loop(None)
    signal.signal(SIGNAL, before)


async def which():
    return asyncio.get_running_loop()


def in_thread(loop, function):
    """Call `function` in a thread while the main thread runs the loop; its value or its error."""
    ended, found = loop.loop.create_future(), []

    def work():
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001
            found.append(error)
        loop.loop.call_soon_threadsafe(ended.set_result, None)

    thread = threading.Thread(target=work)
    thread.start()
    loop.drive(ended)
    thread.join(PATIENCE)
    return found[0]


def test_the_main_thread_and_other_threads_share_one_loop(loop):
    assert loop.call(which(), InterruptSlot(0, main=loop.main)) is loop.loop
    assert in_thread(loop, lambda: loop.call(which(), InterruptSlot(1))) is loop.loop


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_coroutine_raises_reaches_its_slot_and_the_loop_continues(loop, error):
    async def fail():
        raise error

    slot = InterruptSlot(0, main=loop.main)
    with pytest.raises(type(error)):
        loop.call(fail(), slot)
    assert type(in_thread(loop, lambda: loop.call(fail(), InterruptSlot(1)))) is type(error)
    assert loop.call(which(), slot) is loop.loop


def test_a_subtask_that_exits_does_not_end_the_loop(loop, caplog):
    async def leave():
        raise SystemExit(3)

    async def parent():
        task = asyncio.create_task(leave())
        await asyncio.sleep(0.05)
        del task
        return "done"

    assert loop.call(parent(), InterruptSlot(0, main=loop.main)) == "done"
    assert "a coroutine that a task left behind ended with an error" in caplog.text


def interrupted(loop, coroutine, *, thread):
    """Run the coroutine in a slot and interrupt it shortly afterwards; what reached the slot."""
    slot = InterruptSlot(0, main=None if thread else loop.main)

    def call():
        slot.begin(7)
        try:
            return loop.call(coroutine, slot)
        finally:
            slot.end()

    timer = threading.Timer(0.1, lambda: slot.interrupt(7, TimeLimitExceeded))
    timer.start()
    started = time.monotonic()
    try:
        found = in_thread(loop, call) if thread else call()
    except BaseException as error:  # noqa: BLE001
        found = error
    timer.join()
    assert time.monotonic() - started < PATIENCE / 2
    return found


@pytest.mark.parametrize("thread", [False, True])
def test_an_await_is_cancelled_and_becomes_the_interrupt(loop, thread):
    seen = []

    async def waits():
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError as error:
            seen.append(error.args)
            raise

    assert isinstance(interrupted(loop, waits(), thread=thread), TimeLimitExceeded)
    assert seen == [("TimeLimitExceeded",)]


@pytest.mark.parametrize("thread", [False, True])
def test_code_that_blocks_the_loop_is_interrupted(loop, thread):
    async def blocks():
        time.sleep(PATIENCE)

    assert isinstance(interrupted(loop, blocks(), thread=thread), TimeLimitExceeded)


@pytest.mark.parametrize("thread", [False, True])
def test_a_cancellation_of_the_tasks_own_stays_one(loop, thread):
    async def cancels():
        task = asyncio.create_task(asyncio.sleep(PATIENCE))
        task.cancel()
        await task

    slot = InterruptSlot(0, main=None if thread else loop.main)
    if thread:
        found = in_thread(loop, lambda: loop.call(cancels(), slot))
        assert isinstance(found, asyncio.CancelledError)
    else:
        with pytest.raises(asyncio.CancelledError):
            loop.call(cancels(), slot)


def test_an_interrupt_before_the_start_ends_the_run(loop):
    slot = InterruptSlot(0)

    def call():
        slot.begin(7)
        loop.loop.call_soon_threadsafe(time.sleep, 0.2)  # the loop is busy
        threading.Timer(0.05, lambda: slot.interrupt(7, TaskStopped)).start()
        return loop.call(asyncio.sleep(PATIENCE), slot)

    assert isinstance(in_thread(loop, call), TaskStopped)


def test_while_a_process_waits_for_packets_its_loop_runs(loop):
    ours, theirs = socket_pair()
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.01)

    task = loop.loop.create_task(tick())
    threading.Timer(0.2, lambda: Packets(ours).send([1])).start()
    assert loop.receive(Packets(theirs)) == [1]
    assert len(ticks) > 2
    task.cancel()
    ours.close()
    assert loop.receive(Packets(theirs)) is None
    theirs.close()


def test_a_block_is_named_with_its_line_once(loop, caplog):
    watch = LoopWatch(loop)

    async def block():
        watch._looked_at = loop.selector.busy_since
        now = time.monotonic()
        for seconds in (0.2, 0.9, LONGEST_STEP + 0.2, LONGEST_STEP + 0.4):
            watch.look(now + seconds)

    loop.call(block(), InterruptSlot(0, main=loop.main))
    (record,) = caplog.records
    text = record.getMessage()
    assert "blocks the event loop, for 1." in text
    assert f"{__file__}:" in text
    assert "in block" in text
    watch.look(time.monotonic() + 3.0)
    assert "let the event loop continue after" in caplog.records[-1].getMessage()


def test_short_steps_are_not_a_block(loop, caplog):
    watch = LoopWatch(loop)

    async def step():
        watch.look(time.monotonic() + 5.0)

    async def steps():
        await asyncio.gather(*(step() for _ in range(5)))

    loop.call(steps(), InterruptSlot(0, main=loop.main))
    assert "blocks" not in caplog.text


def test_a_block_that_lets_no_thread_run_is_reported_afterwards(loop, caplog):
    watch = LoopWatch(loop)
    loop.selector.last_turn = 3.0
    watch.look(watch._looked_at + 3.0)
    assert "a task called something that let no other thread run" in caplog.text


def test_the_line_is_the_users_and_what_it_calls():
    assert line_of(None) == "an unknown line"
    found = []
    code = compile("add(line_of(sys._getframe()))", f"{LIBRARIES[0]}/library.py", "exec")
    exec(code, {"add": found.append, "line_of": line_of, "sys": sys})  # noqa: S102  # its own text
    assert found[0].startswith(f"{__file__}:")
    assert found[0].endswith("library.py:1 in <module>)")
