"""Reads and writes marks: mutants that make no difference, each with its reason.

A mark is four lines and an empty one. It names the module with its package and the function, but
no line number and no comment, so that it survives moves and rewordings::

    lease.state LeaseBook.next_at
    - while self._heap and self._stale(self._heap[0]):
    + while self._heap or self._stale(self._heap[0]):
    = why it makes no difference

Of mutants of one function that look alike the second has ``(2)`` behind the function, and so on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from .making import Mutant

FILE = Path(__file__).with_name("equivalent.txt")
Key: TypeAlias = tuple[str, str, str, str, int]


def read(path: Path = FILE) -> dict[Key, str]:
    """The reasons, by the mutants' keys. Raises SystemExit where a mark is not complete."""
    marks: dict[Key, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("#"):
            continue
        if line.strip():
            blocks[-1].append(line)
        else:
            blocks.append([])
    for block in filter(None, blocks):
        if len(block) != 4 or [line[:2] for line in block[1:]] != ["- ", "+ ", "= "]:
            raise SystemExit(f"{path.name}: a mark has four lines, not: {block}")
        module, _, place = block[0].partition(" ")
        function, _, same = place.partition(" (")
        number = int(same.rstrip(")") or 1)
        key = (module, function, block[1][2:].strip(), block[2][2:].strip(), number)
        if not block[3][2:].strip():
            raise SystemExit(f"{path.name}: there is no reason for {key}")
        if key in marks:
            raise SystemExit(f"{path.name}: there are two marks for {key}")
        marks[key] = block[3][2:].strip()
    return marks


def write(mutant: Mutant, reason: str = "") -> str:
    """A mark for the mutant, to be completed with its reason."""
    module, function, before, after, same = mutant.key
    number = f" ({same})" if same > 1 else ""
    return f"{module} {function}{number}\n- {before}\n+ {after}\n= {reason}".replace(" \n", "\n")
