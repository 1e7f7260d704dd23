"""Secrets stay out of text, whatever shape they come in; nothing shown moves a cursor."""

import copy
import dataclasses
import io
import logging
import pickle
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.support.display import Secret, SecretFilter, mask, printable

KEY = "bWFza2luZyB0ZXN0IGtleSAvKz0gbmV2ZXIgc2hvd24/+w=="
UNWRAPPED = "bm90IHdyYXBwZWQgaW4gYSBTZWNyZXQgYW55d2hlcmU+/w=="


def test_a_secret_is_given_out_only_on_request():
    secret = Secret(KEY)
    assert KEY not in f"{secret} {secret!r} {secret!s:>10} {[secret]} { {1: secret} }"
    assert secret.reveal() == KEY
    assert secret == Secret(KEY)
    assert secret != Secret(KEY + "x")
    assert secret != KEY
    assert len({secret, Secret(KEY)}) == 1
    assert not Secret("")
    assert not hasattr(secret, "__dict__")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_is_not_pickled(protocol):
    with pytest.raises(TypeError, match="environment"):
        pickle.dumps({"key": Secret(KEY)}, protocol)


def test_a_secret_can_be_copied_with_what_holds_it():
    @dataclasses.dataclass
    class Holder:
        key: Secret

    holder = Holder(Secret(KEY))
    assert copy.deepcopy(holder) == copy.copy(holder) == holder
    assert dataclasses.asdict(holder) == {"key": Secret(KEY)}


@pytest.mark.parametrize("form", [KEY, quote(KEY, safe=""), quote_plus(KEY), f"<{KEY}>"])
def test_a_wrapped_secret_is_masked_wherever_it_turns_up(form):
    Secret(KEY)
    assert "bWFza2luZ" not in mask(f"failed with {form}!")


def test_a_short_secret_does_not_blot_out_ordinary_words():
    Secret("test")
    assert mask("this is a test") == "this is a test"


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey={UNWRAPPED};EntityPath=q",
        f"AccountName=a;AccountKey={UNWRAPPED}",
        f"accountkey = {UNWRAPPED} and more",
        f'{{"AccountKey": "{UNWRAPPED}"}}',
        f"{{'account_key': '{UNWRAPPED}'}}",
        f"https://a.queue.core.windows.net/q?sv=1&sig={quote(UNWRAPPED, safe='')}&se=2",
        f"GET /q?sig={UNWRAPPED} HTTP/1.1",
        f"?u=https%3A%2F%2Fh%3Fsv%3D1%26sig%3D{quote(UNWRAPPED, safe='')}",
        f"SharedAccessSignature=sv=1&sr=x&sig={UNWRAPPED}",
        f"SharedAccessSignature sr=x&sig={UNWRAPPED}&se=1&skn=n",
        f"Authorization: SharedKey account:{UNWRAPPED}",
        f"'Authorization': 'Bearer {UNWRAPPED}'",
        f"amqps://user:{quote(UNWRAPPED, safe='')}@host/queue",
        f"signing_key={UNWRAPPED}",
    ],
)
def test_known_shapes_are_masked_and_the_rest_is_kept(text):
    masked = mask(text)
    assert "****" in masked
    assert "bm90IHdyYXBw" not in masked
    assert mask(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "SharedAccessKeyName=RootManageSharedAccessKey;EntityPath=q",
        "task shop.resize took 3 s; see https://example.net/docs?page=2",
        "signature of resize(path, width)",
        "",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert mask(text) == text


@given(st.text())
def test_printable_is_one_quoted_line(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown[0] == shown[-1] == "'"
    assert shown.encode()


def test_printable_escapes_cuts_and_masks():
    assert printable("a\r\n\x1b[31m\x00\ud800\u202e\\") == r"'a\r\n\x1b[31m\x00\ud800\u202e\\'"
    assert printable("abc" * 100, 5) == "'abcab...'"  # x's may be a secret of other tests
    assert UNWRAPPED[:4] not in printable(f"AccountKey={UNWRAPPED}", 14)


@pytest.fixture
def log():
    """A logger with a filtered handler, and the stream it writes to."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(SecretFilter())
    logger = logging.getLogger("tests.masking")
    logger.propagate = False
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger, stream
    logger.removeHandler(handler)


class Textless:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def test_an_argument_without_a_text_neither_raises_nor_hides_the_record(log):
    logger, stream = log
    logger.warning("task %s failed: %s", "a", Textless())
    assert "task %s failed: %s ('a', <Textless" in stream.getvalue()


def test_log_records_are_masked_in_message_arguments_and_traceback(log):
    logger, stream = log
    logger.debug('%s "GET %s HTTP/1.1"', "https://h:443", f"/q?sv=1&sig={UNWRAPPED}")
    try:
        raise ValueError(f"AccountKey={UNWRAPPED}")
    except ValueError:
        logger.exception("it failed", stack_info=True)
    assert "bm90IHdyYXBw" not in stream.getvalue()
    assert "ValueError: AccountKey=****" in stream.getvalue()
    assert "/q?sv=1&sig=****" in stream.getvalue()


def test_a_log_call_with_wrong_arguments_does_not_break_the_caller(log):
    logger, stream = log
    logger.info("%d of %d", "one", f"AccountKey={UNWRAPPED}")
    assert "bm90IHdyYXBw" not in stream.getvalue()
    assert "of" in stream.getvalue()
