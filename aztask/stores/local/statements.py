"""The statements for one table of a kind, built from the names of its layout and nothing else.

`SqlLayout` and `Kind` refuse every name that is no identifier; data always travels as a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from aztask.stores.rows import Kind


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements; ``ADDRESS`` are the values of owner, partition and key, as far as they exist.

    * `get`: ADDRESS. Gives the columns and the version.
    * `range`: ADDRESS without the key, first, last, limit. Gives partition and key, then as `get`.
      `short`: without the values of the long column.
    * `due`: owner, before, limit. Gives partition and key.
    * `of_owner`: owner, length of the prefix, prefix, written before, partition and key (or number)
      to begin after, limit. Gives the same as `range`.
    * `owners`: gives broker and app, or anything if the table has rows without an owner.
    * `insert`: ADDRESS, perhaps version and time, columns. `insert_alone`: and ADDRESS without the
      owner.
    * `replace`: columns, perhaps the time, ADDRESS, version, perhaps the guard.
    * `delete`: ADDRESS (without the key, in a kind with numbers), version, perhaps the guard.
      `drop`: ADDRESS.
    * `merge`: for each column whether it is given, and its value; perhaps the time; ADDRESS.
    """

    get: str
    range: str
    short: str
    due: str
    of_owner: str
    owners: str
    insert: str
    insert_alone: str
    replace: str
    delete: str
    drop: str
    merge: str

    @staticmethod
    def of(kind: Kind, *, owned: bool) -> Statements:
        """The statements for rows with an owner, or without."""
        layout = kind.sql
        table = layout.owned if owned else layout.unowned
        owner = (("broker", "app") if layout.app else ("broker",)) if owned else ()
        at = [each for each in (layout.partition, layout.key) if each]
        address, columns = [*owner, *at], ", ".join(kind.columns)
        short = ", ".join("NULL" if each == kind.long else each for each in kind.columns)
        version = layout.version or _EMPTY
        scope = "".join(f"{each} = ? AND " for each in owner)
        here = " AND ".join(f"{each} = ?" for each in address)
        beside = " AND ".join(f"{each} = ?" for each in at)
        place = f"{layout.partition or _EMPTY} AS partition, {layout.key or _EMPTY} AS row_key"
        key, partition = kind.number or layout.key or _EMPTY, layout.partition or layout.key
        order = ", ".join([partition, kind.number] if kind.number else at)
        stamp = [layout.written] if layout.written else []
        # The key of a row with a number may be damaged, so that no text finds it.
        known = f"{scope}{partition} = ?" if kind.number else here
        current = f"{known} AND {version} = ?" + (
            f" AND {layout.guard} = ?" if layout.guard else ""
        )
        made = [layout.version] if layout.version and not kind.number else []
        new = [*address, *made, *stamp, *kind.columns]
        into = f"INSERT INTO {table} ({', '.join(new)})"
        marks = ", ".join("?" * len(new))
        stamped = "".join(f", {each} = ?" for each in stamp)
        assigned = ", ".join(f"{each} = ?" for each in kind.columns)
        kept = ", ".join(f"{each} = CASE WHEN ? THEN ? ELSE {each} END" for each in kind.columns)
        within = f"{scope}{layout.partition} = ?" if layout.partition else f"{scope}true"
        ranged = f"AND {key} >= ? AND {key} < ? ORDER BY {order} LIMIT ?"
        raised = f"{version} = {version} + 1, " if made else ""
        return Statements(
            f"SELECT {columns}, {version} FROM {table} WHERE {here}",
            f"SELECT {place}, {columns}, {version} FROM {table} WHERE {within} {ranged}",
            f"SELECT {place}, {short}, {version} FROM {table} WHERE {within} {ranged}",
            f"SELECT {place} FROM {table} WHERE {scope}{kind.due} < ? ORDER BY {kind.due} LIMIT ?",
            f"SELECT {place}, {columns}, {version} FROM {table} WHERE {scope}"
            f"substr({partition}, 1, ?) = ? AND {layout.written or 0} < ? "
            f"AND ({layout.partition or _EMPTY}, {key}) > (?, ?) ORDER BY {order} LIMIT ?",
            f"SELECT DISTINCT {', '.join(owner)} FROM {table}"
            if owned
            else f"SELECT 1 FROM {table} LIMIT 1",
            f"{into} VALUES ({marks}) ON CONFLICT DO NOTHING",
            f"{into} SELECT {marks} WHERE NOT EXISTS "
            f"(SELECT 1 FROM {layout.unowned} WHERE {beside}) ON CONFLICT DO NOTHING",
            f"UPDATE {table} SET {raised}{assigned}{stamped} WHERE {current}",
            f"DELETE FROM {table} WHERE {current}",
            f"DELETE FROM {table} WHERE {here}",
            f"UPDATE {table} SET {raised}{kept}{stamped} WHERE {here}",
        )


_EMPTY = "''"
