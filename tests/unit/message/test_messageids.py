"""Message ids under an id key: fixed for each clone, and impossible to guess without the key."""

import dataclasses
import hashlib
import hmac

import pytest

from aztask.errors import ConfigurationError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage

ID_KEY = b"i" * 32
MESSAGE = TaskMessage(id="order-7", task="shop.pay", queue="pay", body=b"\x93\x90\x80\x80")


def test_a_clone_has_one_id_whatever_the_signing_keys():
    """The id key stays when the signing keys rotate."""
    clone = MESSAGE.resubmitted(counted=True)
    ids = {
        Codec(signing_keys=keys, id_key=ID_KEY).to_envelope(clone).message_id
        for keys in ([b"a" * 32], [b"b" * 32, b"a" * 32], [b"b" * 32])
    }
    assert len(ids) == 1
    assert ids != {Codec(id_key=b"j" * 32).to_envelope(clone).message_id}


def test_each_clone_has_its_own_id_which_does_not_show_the_task_id():
    codec = Codec(id_key=ID_KEY)
    messages = [
        MESSAGE,
        MESSAGE.resubmitted(counted=True),
        MESSAGE.replayed(),
        MESSAGE.pointing(5, counted=True, delivery_base=0),
        dataclasses.replace(MESSAGE, id="x" * 1000),
    ]
    ids = [codec.to_envelope(each).message_id for each in messages]
    assert len({*ids}) == len(ids)
    for name in ids:
        assert len(name) <= 128
        assert "order-7" not in name


def test_others_can_compute_it_with_the_key():
    digest = hmac.new(ID_KEY, b"aztask-id:1order-7:0:0", hashlib.sha256).hexdigest()
    assert Codec(id_key=ID_KEY).message_id(MESSAGE) == f"keyed-{digest}"
    assert Codec().message_id(MESSAGE) == "order-7:0:0"


@pytest.mark.parametrize("key", ["text" * 8, b"short", b""])
def test_a_wrong_id_key_is_refused_without_being_shown(key):
    with pytest.raises(ConfigurationError, match="the id key must be bytes, at least 16") as caught:
        Codec(id_key=key)
    assert "texttext" not in str(caught.value)
