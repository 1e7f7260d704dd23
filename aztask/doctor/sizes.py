"""How much the result store and the event directory hold, for ``aztask doctor``."""

from __future__ import annotations

from pathlib import Path

from aztask.results.base import Measurable, ResultStore, StoreSize
from aztask.support.display import byte_text


def store_text(store: ResultStore) -> str | None:
    """What the store holds; None if it cannot say."""
    return _described(store.size()) if isinstance(store, Measurable) else None


def _described(size: StoreSize) -> str:
    least = "" if size.complete else "at least "
    parts = [f"{least}{size.rows:,} runs"]
    if size.unfinished is not None:
        parts[0] += f", {size.unfinished:,} of them not ended"
    if size.file_bytes is not None:
        parts.append(f"a file of {byte_text(size.file_bytes)}")
    if size.blobs is not None:
        parts.append(f"{size.blobs:,} blobs of {byte_text(size.blob_bytes or 0)}")
    return f"the result store holds {'; '.join(parts)}"


def events_text(directory: Path) -> str:
    """How many event files the directory holds, those that are still open included."""
    count, size = 0, 0
    for pattern in ("date=*/hour=*/[!._]*.jsonl", ".*.jsonl"):
        for path in directory.glob(pattern):
            try:
                size += path.lstat().st_size
            except OSError:
                continue  # a worker has deleted or renamed it
            count += 1
    return f"{count:,} event files of {byte_text(size)} in {directory}"
