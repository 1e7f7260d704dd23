"""Signatures in the form of the release before, which reads these rows and wrote others."""

from dataclasses import replace

import msgpack
import pytest

from aztask.address.owner import Owner
from aztask.message.encryption import Cipher
from aztask.message.rowsignatures import Purpose, RowSignatures
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, State
from aztask.stores.records.controls import _objection, _signature
from aztask.stores.records.damage import Damaged
from aztask.stores.records.rowsigning import RowSigner, pack_body
from aztask.stores.rows import Place

OWNER = Owner("servicebus://shop", "app")
OUTCOME = Outcome(State.SUCCEEDED, Complete(), b"\x07", at=1_764_326_307.1234567, duration=0.125)
RUN = RunKey("paid", 1, 2)
SIGNED_OUTCOME = bytes.fromhex(
    "01765187bcda129370ed061de2be7949c296422f64f0a349a889319894858463b8d993a09260adcbe5"
    "e67e97b4fc2ecd91611966f92fdd226f2b09b456f2fd8430877b226c19ef70df"
)
LIMIT = Place(OWNER, "limit-mail")


def signer(*, old: bool = True) -> RowSigner:
    return RowSigner(RowSignatures([b"k" * 40], old=old), OWNER)


def test_an_outcome_is_signed_as_the_release_before_signs_and_reads_it():
    assert signer().sign_outcome(RUN, OUTCOME, pack_body(OUTCOME)) == SIGNED_OUTCOME
    assert not signer().check_outcome(RUN, OUTCOME, SIGNED_OUTCOME, OWNER.broker)


def test_an_entry_of_an_app_is_signed_so_that_the_release_before_reads_it():
    """It signs the name alone."""
    before = signer().sign(Purpose.CONTROL, [LIMIT.partition], b"state")
    assert _signature(signer(), LIMIT, b"state") == before
    for reader in (signer(), signer(old=False)):
        assert _objection(reader, LIMIT, before, b"state") == ""
        assert _objection(reader, LIMIT, before, b"other") != ""


@pytest.mark.parametrize("parts", [[], [b"", ""], [1, "", ""], [b"", None, ""], {"value": b""}])
def test_what_is_encrypted_and_is_no_outcome_is_damaged(parts):
    cipher = Cipher([b"k" * 40], encrypt=True)
    reader = RowSigner(RowSignatures([b"k" * 40], cipher=cipher), OWNER)
    place = ("outcome", RUN.task_id, RUN.generation, RUN.hop)
    closed = replace(OUTCOME, value=cipher.encrypt(msgpack.packb(parts), *place))
    with pytest.raises(Damaged, match="its value is not that of an outcome"):
        reader.opened(RUN, closed)


def test_without_old_releases_an_entry_is_signed_for_its_app():
    other = Place(Owner(OWNER.broker, "other"), "limit-mail")
    made = _signature(signer(old=False), LIMIT, b"state")
    assert _objection(signer(old=False), LIMIT, made, b"state") == ""
    assert _objection(signer(old=False), other, made, b"state") != ""
