"""Where each store keeps the rows of a kind: tables and columns, partition keys and row keys.

Over SQLite, rows with an owner are in a table of their own, which the release before does not
read. Over Tables, they are in partitions that begin with a capital letter and the owner's mark,
such as ``U-MARK-SHARD`` for ``u-SHARD``: the release before reads none of them. Each row has the
owner's broker (and app) as properties, too, since a mark cannot be read back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from zlib import crc32

from aztask.address.owner import Owner

# -- keys ------------------------------------------------------------------------------------
#
# Texts as parts of keys in Azure Tables, and the shards that spread many rows.
#
# Keys contain only letters, digits and a few signs: all other characters are escaped, and a long
# text is hashed. (The service forbids ``/ \ # ?`` and control characters, and more than 1 KiB.)


SHARDS: Final = 4
"""A partition serves 2,000 requests a second, an account 20,000: at four requests for each task,
this many shards are enough."""

LONGEST_KEY: Final = 250
_PLAIN: Final = re.compile(r"[^A-Za-z0-9.:-]")


class KeyText(str):
    """A text that is a part of a key already: one that was read from a key, and may be hashed."""

    __slots__ = ()


def key_text(text: str) -> str:
    """`text` as a part of a key; two texts never give the same."""
    if isinstance(text, KeyText):
        return text
    escaped = _PLAIN.sub(lambda match: f"_{ord(match[0]):x}_", text)
    if len(escaped) <= LONGEST_KEY:
        return escaped
    return f"~{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def shard_of(text: str) -> int:
    """The number of the shard that a key belongs to."""
    return crc32(text.encode()) % SHARDS


# -- layout ----------------------------------------------------------------------------------


_TOP: Final = 10**14 - 1


@dataclass(frozen=True, slots=True)
class SqlLayout:
    """The two tables of a kind in a SQLite file; only the second one is known to former releases.

    * `owned`: with the columns ``broker`` and, if `app`, ``app``. `unowned`: without these.
    * `partition`, `key`: the columns of the place; "" if the kind needs none.
    * `version`: the column that names the version. The number of a kind with numbers is one. "" for
      rows that are never replaced or deleted as they were read: these have no tag.
    * `written`: a column for the time of the last write, if any.
    * `guard`: a column that must be unchanged, too: former releases give a new row a version that
      one before it had.
    * `steps`: the migrations by component (`Database.migrate`). Released ones never change.
    """

    owned: str
    unowned: str
    partition: str = ""
    key: str = ""
    app: bool = False
    version: str = "version"
    written: str = ""
    guard: str = ""
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Statements are built from these names, so they are names and nothing else."""
        names = [self.owned, self.unowned, self.partition, self.key, self.version]
        names += [self.written, self.guard]
        if not all(each == "" or (each.isidentifier() and each.isascii()) for each in names):
            raise ValueError(f"{self} has a name that is no identifier")


@dataclass(frozen=True, slots=True)
class TablesLayout:
    """A partition for each partition of the kind: ``K-MARK-PARTITION``, or ``k-PARTITION``.

    * `owned`, `unowned`: how partitions begin, with and without an owner.
    * `row`: how row keys begin; the row's key follows.
    * `key`: the property that keeps the key as it is, "" if none: a long key is hashed.
    * `packed`: the columns that are packed together into one property, by its name.
    """

    owned: str
    unowned: str
    row: str = "d"
    key: str = ""
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def beginning(self, owner: Owner) -> str:
        """How the partitions of an owner begin."""
        return f"{self.owned}-{owner.mark}-" if owner.known else f"{self.unowned}-"

    def partition(self, owner: Owner, partition: str, key: str) -> str:
        """The partition key of a row."""
        return f"{self.beginning(owner)}{key_text(partition)}"

    def partitions(self, owner: Owner, partition: str) -> Iterable[str]:
        """The partition keys that one partition of the kind has."""
        return (self.partition(owner, partition, ""),)

    def row_key(self, key: str) -> str:
        """The row key of a row."""
        return f"{self.row}{key_text(key)}" if key else self.row

    def key_in(self, row_key: str) -> str:
        """The key that a row key has, for `row_key` alone."""
        return KeyText(row_key.removeprefix(self.row))

    def partition_in(self, owner: Owner, partition_key: str) -> str:
        """The kind's partition that a partition key has, for `partition` alone."""
        return KeyText(partition_key.removeprefix(self.beginning(owner)))


@dataclass(frozen=True, slots=True)
class Shards(TablesLayout):
    """One partition of the kind, spread over several: ``U-MARK-SHARD``, or ``u-SHARD``."""

    def partition(self, owner: Owner, partition: str, key: str) -> str:
        """The partition key of a row: the shard of its key."""
        return f"{self.beginning(owner)}{shard_of(key_text(key))}"

    def partitions(self, owner: Owner, partition: str) -> Iterable[str]:
        """The shards of one partition, each a partition key."""
        return [f"{self.beginning(owner)}{shard}" for shard in range(SHARDS)]

    def partition_in(self, owner: Owner, partition_key: str) -> str:
        """The one partition of the kind, which has no name."""
        return ""


def number_key(number: int) -> str:
    """A row's number as a key, in the order of the numbers."""
    return f"{number:020d}"


def due_key(at: float, key: str = "") -> str:
    """The row key of the mark that a row is due at a time; without a key, how they all begin.

    Marks are in the order of their times. What is due never, or was due always, comes last or
    first.
    """
    bounded = round(min(max(at, 0.0), _TOP / 1000) * 1000)
    return f"d-{min(bounded, _TOP):014d}" + (f"-{key_text(key)}" if key else "")
