"""What a deployment is made of, once for all formats: resources, and expressions in them.

Rules
1. A value is plain data, or an expression: a parameter, a property of another resource, a text put
   together from these. Each format has its own words for them.
2. A user's text is data. It becomes part of an expression as a `Concat` only, which formats quote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# -- expressions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Param:
    """The value of a parameter or of a local name."""

    name: str


@dataclass(frozen=True, slots=True)
class Of:
    """A property of another resource: ``id``, ``name``, or a path below ``properties``."""

    symbol: str
    path: str = "id"


@dataclass(frozen=True, slots=True)
class Concat:
    """A text put together from texts and expressions."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Guid:
    """A GUID that is the same for the same parts: the name of a role assignment."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RoleId:
    """The resource id of a role that is built into Azure."""

    guid: str


@dataclass(frozen=True, slots=True)
class Special:
    """What each format says in its own words."""

    arm: str
    bicep: str
    terraform: str


@dataclass(frozen=True, slots=True)
class Note:
    """A value with a comment above it, where the format has comments."""

    text: str
    value: Any


GROUP: Final = Special("resourceGroup().id", "resourceGroup().id", "var.resource_group_id")
TENANT: Final = Special(
    "tenant().tenantId", "tenant().tenantId", "data.azapi_client_config.current.tenant_id"
)


# -- the tree --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """What you may say when you deploy."""

    name: str
    text: str
    default: str | Special = ""
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource.

    * `symbol`: its name in the files; `kind`: its type; `api`: the version of it.
    * `parent`: the symbol of the resource that it is in; `scope`: that of the one that it is about.
    * `needs`: parameters; it is made only if none of them is empty.
    * `existing`: it comes with its parent, and is only referred to.
    """

    symbol: str
    kind: str
    api: str
    name: Any
    comment: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    scope: str = ""
    needs: tuple[str, ...] = ()
    existing: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """All of a deployment. `names`: local names, and what they stand for."""

    parameters: tuple[Parameter, ...]
    names: Mapping[str, Special]
    resources: tuple[Resource, ...]
    outputs: Mapping[str, Any]

    def __getitem__(self, symbol: str) -> Resource:
        return next(each for each in self.resources if each.symbol == symbol)


LOCATION: Final = Param("location")
SUFFIX: Final = Param("suffix")


def container_address(container: str) -> Concat:
    """The address of a container, for a setting."""
    return Concat(("blob://", Param("account"), f"/{container}"))


def diagnostics(symbol: str, about: str, categories: tuple[str, ...]) -> Resource:
    """What sends the logs of a resource to the workspace."""
    return Resource(
        symbol,
        "Microsoft.Insights/diagnosticSettings",
        "2017-05-01-preview",
        "aztask",
        "Its logs go to the workspace.",
        {
            "properties": {
                "workspaceId": Of("workspace"),
                "logs": [{"category": each, "enabled": True} for each in categories],
            }
        },
        scope=about,
    )
