"""Rows that a benchmark fills into Azurite at once are those that requests would have inserted."""

from __future__ import annotations

import json
from pathlib import Path

import azurite
import pytest
from azure.data.tables import TableServiceClient

VALUES = {"text": "ä", "whole": 7, "odd": 2.5, "yes": True}
TYPES = {"odd@odata.type": "Edm.Double", "raw@odata.type": "Edm.Binary"}
KEYS = [("p-2", "a"), ("p-1", "b"), ("p-1", "a"), ("p-2~", "it's"), ("p-1", "c"), ("p-1", "B")]


@pytest.mark.services
def test_what_is_filled_in_is_read_as_what_was_inserted(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    rows = [
        {"PartitionKey": one, "RowKey": two, **VALUES, "raw": "AAE=", **TYPES} for one, two in KEYS
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    with azurite.running(tmp_path / "t", service="table", fillable=True) as server:
        service = TableServiceClient.from_connection_string(server.connection_string)
        one, two = map(service.create_table, ("inserted", "filled"))
        with service:
            for first, second in KEYS:
                one.create_entity(
                    {"PartitionKey": first, "RowKey": second, **VALUES, "raw": b"\0\1"}
                )
            assert server.fill("filled", file) == len(KEYS)
            for asked in (
                "",
                "PartitionKey eq 'p-1'",
                "PartitionKey ge 'p-1' and PartitionKey lt 'p-2~'",
                "PartitionKey gt 'p-1'",
                "PartitionKey eq 'p-1' and (RowKey eq 'b' or RowKey eq 'c')",
                "PartitionKey eq 'p-2' or PartitionKey eq 'p-1'",
                "PartitionKey eq 'p-2~' and RowKey eq 'it''s'",
                "not (PartitionKey eq 'p-1')",
                "PartitionKey eq 'nowhere'",
            ):
                for size in (1, 3, None):
                    pages = [
                        [
                            list(page)
                            for page in table.query_entities(asked, results_per_page=size).by_page()
                        ]
                        for table in (one, two)
                    ]
                    assert pages[0] == pages[1], (asked, size)
            assert two.get_entity("p-1", "b")["raw"] == b"\0\1"
            two.delete_entity("p-1", "b")
            left = two.query_entities("PartitionKey eq 'p-1'")
            assert [each["RowKey"] for each in left] == ["B", "a", "c"]
        with pytest.raises(RuntimeError, match="the table none was not filled"):
            server.fill("none", file)
