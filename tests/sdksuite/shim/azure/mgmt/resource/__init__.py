"""Resource groups, which the emulator has none of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class _ResourceGroups:
    """Remembers nothing."""

    def create_or_update(self, name: str, _parameters: Any) -> SimpleNamespace:
        """A group of this name."""
        return SimpleNamespace(name=name)

    def begin_delete(self, _name: str, **_options: Any) -> SimpleNamespace:
        """Nothing is left to delete."""
        return SimpleNamespace(result=lambda: None, wait=lambda _timeout: None, done=lambda: True)


class ResourceManagementClient:
    """The client of resource groups."""

    resource_groups = _ResourceGroups()
