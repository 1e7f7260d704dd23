"""The blob service, and the SDK's client of one container, as far as aztask uses it.

A blob is written and read as a whole; its bytes never change while it exists under its name, unless
it is uploaded again. Listings are in the order of the names, 1,000 to a page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError

from aztask.support.clock import Clock

from .azureerrors import ask
from .tableclient import Pages
from .wire import Line, Refused, Service

Answer = TypeVar("Answer")

DEFAULT_READ: Final = 30.0
PAGE: Final = 5000

_KINDS: Final = {404: ResourceNotFoundError, 409: ResourceExistsError}


class Blobs:
    """All containers of one account: names and bytes.

    * `containers`: what it keeps.
    """

    def __init__(self, clock: Clock) -> None:
        """clock: the service's."""
        self.clock = clock
        self.containers: dict[str, dict[str, bytes]] = {}

    def create(self, container: str) -> None:
        """Create a container."""
        if container in self.containers:
            raise Refused(409, "ContainerAlreadyExists")
        self.containers[container] = {}

    def put(self, container: str, name: str, data: bytes) -> None:
        """Write a blob, whether it exists or not."""
        self._container(container)[name] = bytes(data)

    def get(self, container: str, name: str) -> bytes:
        """The bytes of a blob."""
        found = self._container(container).get(name)
        if found is None:
            raise Refused(404, "BlobNotFound")
        return found

    def delete(self, container: str, name: str) -> None:
        """Delete a blob."""
        if self._container(container).pop(name, None) is None:
            raise Refused(404, "BlobNotFound")

    def page(
        self, container: str, size: int, after: str | None
    ) -> tuple[list[tuple[str, int]], str | None]:
        """Names and sizes from `after` on, and where the rest begins; None if that was all."""
        kept = self._container(container)
        names = sorted(kept)
        begin = 0 if after is None else bisect_left(names, after)
        found = [(name, len(kept[name])) for name in names[begin : begin + size]]
        rest = names[begin + size : begin + size + 1]
        return found, rest[0] if rest else None

    def _container(self, name: str) -> dict[str, bytes]:
        if name not in self.containers:
            raise Refused(404, "ContainerNotFound")
        return self.containers[name]


class ModelContainer:
    """The SDK's client of one container."""

    def __init__(self, service: Blobs, line: Line, container: str) -> None:
        self._service = service
        self._line = line
        self._container = container

    def create_container(self, **options: Any) -> None:
        self.ask("create container", lambda: self._service.create(self._container), options)

    def upload_blob(self, name: str, data: bytes, **options: Any) -> None:
        self.get_blob_client(name).upload_blob(data, **options)

    def download_blob(self, name: str, offset: int, length: int, **options: Any) -> Any:
        found = self.get_blob_client(name).download_blob(**options).readall()
        return SimpleNamespace(readall=lambda: found[offset : offset + length])

    def delete_blob(self, name: str, **options: Any) -> None:
        self.get_blob_client(name).delete_blob(**options)

    def delete_blobs(self, *names: str, raise_on_any_failure: bool, **options: Any) -> list[Any]:
        """One request for all: each is deleted or was missing."""

        def execute() -> list[int]:
            return [self._deleted(name) for name in names]

        statuses = self.ask("delete many", execute, options)
        return [SimpleNamespace(status_code=each) for each in statuses]

    def _deleted(self, name: str) -> int:
        try:
            self._service.delete(self._container, name)
        except Refused as refused:
            if refused.code != "BlobNotFound":
                raise
            return refused.status
        return 202

    def get_blob_client(self, name: str) -> ModelBlob:
        return ModelBlob(self._service, self, self._container, name)

    def list_blobs(
        self, name_starts_with: str | None = None, results_per_page: int = PAGE, **options: Any
    ) -> Pages:
        beginning = name_starts_with or ""

        def ask_page(after: Any) -> tuple[list[Any], Any]:
            found, rest = self._page(results_per_page, after or beginning, options)
            mine = [each for each in found if each[0].startswith(beginning)]
            blobs = [SimpleNamespace(name=name, size=size) for name, size in mine]
            return blobs, rest if len(mine) == len(found) else None

        return Pages(ask_page)

    def list_blob_names(self, results_per_page: int, **options: Any) -> Pages:
        def ask_page(after: Any) -> tuple[list[Any], Any]:
            found, rest = self._page(results_per_page, after, options)
            return [name for name, _ in found], rest

        return Pages(ask_page)

    def _page(self, size: int, after: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        return self.ask("list", lambda: self._service.page(self._container, size, after), options)

    def close(self) -> None:
        """There are no connections."""

    def ask(
        self, operation: str, execute: Callable[[], Answer], options: Mapping[str, Any]
    ) -> Answer:
        """One request. Raises AzureError."""
        patience = options.get("read_timeout", DEFAULT_READ)
        try:
            return ask(self._line, Service.BLOBS, operation, execute, self._container, patience)
        except HttpResponseError as error:
            kind = _KINDS.get(error.status_code or 0)
            if kind is None:
                raise
            raise kind(message=error.message, response=error.response) from None


class ModelBlob:
    """The SDK's client of one blob."""

    def __init__(self, service: Blobs, owner: ModelContainer, container: str, name: str) -> None:
        self._service = service
        self._owner = owner
        self._place = (container, name)

    def upload_blob(self, data: bytes, overwrite: bool, **options: Any) -> None:
        self._owner.ask("upload", lambda: self._service.put(*self._place, data), options)

    def download_blob(self, **options: Any) -> Any:
        found = self._owner.ask("download", lambda: self._service.get(*self._place), options)
        return SimpleNamespace(readall=lambda: found)

    def delete_blob(self, **options: Any) -> None:
        self._owner.ask("delete", lambda: self._service.delete(*self._place), options)
