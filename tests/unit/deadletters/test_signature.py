import string
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.operate.deadletters.letters import SIGNATURE_LIMIT, error_signature


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        (
            "ConnectionError: no answer from 10.0.3.7:5432 after 31.5 s (failed 6 of 6 runs)",
            "ConnectionError: no answer from <address> after <n> s",
        ),
        ("KeyError: 'user_12'", "KeyError: <text>"),
        (r"KeyError: 'it\'s'", "KeyError: <text>"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/in/7.csv'",
            "FileNotFoundError: [Errno <n>] No such file or directory: <text>",
        ),
        (
            "requests.HTTPError: 503 Server Error for url: https://api.example.net/a?b=1",
            "requests.HTTPError: <n> Server Error for url: <url>",
        ),
        (
            "ValueError: order 7f3a9c01-1111-2222-3333-444455556666 of ann@example.net isn't valid",
            "ValueError: order <uuid> of <email> isn't valid",
        ),
        ("TypeError: <Foo object at 0x7F8a> is bad", "TypeError: <Foo object at <hex>> is bad"),
        ("late: 2026-01-02T10:11:12.123Z and 10:11:12", "late: <time> and <time>"),
        ('cannot parse "abc def', "cannot parse <text>"),
        (
            r"OSError: cannot open C:\Users\x\y.txt or data/2024/x.csv and/or /srv/a",
            "OSError: cannot open <path> or <path> and/or <path>",
        ),
        ("don't touch the users' table", "don't touch the users' table"),
        ("worker-12: -1.5e-10 of 1,234.5", "worker-<n>: <n> of <n>"),
        ("lists [1, 2, 3, 4] and [1, 2]", "lists [<n> …] and [<n>, <n>]"),
        ("fe80::1 is down, std::vector is not", "<address> is down, std::vector is not"),
        ("commit 9fceb02d0ae598e9 is bad", "commit <hex> is bad"),
        ("token AbC9defghijklmnopqrstuvw was used", "token <id> was used"),
        ("Utf8Error: bad\n  byte\t0xff", "Utf8Error: bad byte <hex>"),
        ("ZeroDivisionError", "ZeroDivisionError"),
        ("", ""),
    ],
)
def test_what_differs_is_replaced_and_the_rest_can_be_read(text, signature):
    assert error_signature(text) == signature


@given(
    st.integers(-(10**12), 10**12),
    st.uuids(),
    st.ip_addresses(v=4),
    st.text(string.ascii_letters + " ./:-", max_size=20),
)
def test_values_do_not_change_it(number, some_id, address, word):
    def error(number, some_id, address, word):
        return (
            f"AppError: {number} items of {some_id} at {address}:80 for {word!r}, handle "
            f"{abs(number) + 2**40:#x}"
        )

    assert error_signature(error(number, some_id, address, word)) == error_signature(
        error(1, uuid.UUID(int=5), "10.0.0.1", "x")
    )


@given(st.text())
def test_any_text_gives_one_short_line(text):
    signature = error_signature(text)
    assert len(signature) <= SIGNATURE_LIMIT
    assert len(signature.splitlines()) <= 1
    assert error_signature(text) == signature


@given(st.text(), st.text())
def test_only_so_much_is_read(text, rest):
    long = text.ljust(1024, "x")[:1024]
    assert error_signature(long + rest) == error_signature(long)
