"""Bodies that other producers compressed."""

import bz2
import lzma
import zlib

import pytest

from aztask.errors import ContentRefused, DecodeError
from aztask.message.bounds import MessageLimits
from aztask.message.compression import decompress

BODY = b"[[1, 2], {}, {}]" * 10
LIMITS = MessageLimits(body_bytes=1000)
METHODS = {
    "application/x-gzip": zlib.compress,
    "application/x-bz2": bz2.compress,
    "application/x-lzma": lzma.compress,
}


@pytest.mark.parametrize("kind", METHODS)
def test_each_method_is_read_within_the_limit(kind):
    assert decompress(METHODS[kind](BODY), kind, LIMITS) == BODY
    with pytest.raises(ContentRefused, match="more than the 1000 allowed"):
        decompress(METHODS[kind](b"\0" * 1_000_000), kind, LIMITS)


@pytest.mark.parametrize("kind", METHODS)
def test_a_cut_or_a_damaged_body_is_an_error(kind):
    whole = METHODS[kind](BODY)
    with pytest.raises(DecodeError, match="ends too early"):
        decompress(whole[:-4], kind, LIMITS)
    with pytest.raises(DecodeError, match="is damaged"):
        decompress(b"no stream of this kind", kind, LIMITS)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("junk", [b"x", b"junk" * 100, zlib.compress(b"another body")])
def test_bytes_behind_the_stream_are_refused(kind, junk):
    with pytest.raises(DecodeError, match=f"^{len(junk)} bytes follow the end"):
        decompress(METHODS[kind](BODY) + junk, kind, LIMITS)


@pytest.mark.parametrize("kind", ["application/zstd", None, 7])
def test_every_other_method_is_refused(kind):
    with pytest.raises(ContentRefused, match="which is not accepted"):
        decompress(BODY, kind, LIMITS)
