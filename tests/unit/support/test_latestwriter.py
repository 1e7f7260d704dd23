"""Output that delays nobody, on real pipes."""

import os

import pytest

from aztask.emulator.view import LatestWriter


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test has closed it


def test_the_last_text_is_written_before_it_is_closed(pipe):
    reading, writing = pipe
    writer = LatestWriter(writing)
    writer.write("one\n")
    writer.close()
    assert os.read(reading, 100) == b"one\n"


def test_a_full_pipe_delays_nobody_and_the_newest_text_is_kept(pipe):
    reading, writing = pipe
    writer = LatestWriter(writing)
    long = "x" * 200_000
    for text in (long, "old\n", "new\n"):
        writer.write(text)  # would block for ever: nobody reads
    writer.close(0.2)
    data = b""
    while not data.endswith(b"\n"):
        data += os.read(reading, 65_536)
    assert data.rstrip(b"\n").decode() in (long + "new", "new")


def test_a_reader_that_has_gone_is_no_error(pipe):
    reading, writing = pipe
    os.close(reading)
    writer = LatestWriter(writing)
    writer.write("one\n")
    writer.close()
    writer.write("two\n")


def test_nothing_written_starts_no_thread(pipe):
    writer = LatestWriter(pipe[1])
    writer.close()
