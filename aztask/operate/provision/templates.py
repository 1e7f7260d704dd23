"""A tree of resources as an ARM template, as Bicep, and as Terraform with the azapi provider.

Rules
1. The same tree gives the same bytes. Terraform is formatted as ``terraform fmt`` would.
2. What a user wrote stays text: quotes, brackets, ``${`` and the like are escaped in each format.
3. azapi, and not azurerm: its resources have the types, versions and properties of the other two,
   so that one tree and one check serve all three.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aztask.operate.provision.tree import (
    Concat,
    Guid,
    Note,
    Of,
    Param,
    Parameter,
    Resource,
    RoleId,
    Special,
    Tree,
)

ROLES_TYPE: Final = "Microsoft.Authorization/roleDefinitions"
SCHEMA: Final = "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#"
EXPRESSIONS: Final = (Param, Of, Concat, Guid, RoleId, Special)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Format(ABC):
    """Writes a tree in one format."""

    def __init__(self, tree: Tree, title: str) -> None:
        """title: one line that says what the file is of."""
        self.tree = tree
        self.title = title

    @abstractmethod
    def text(self) -> str:
        """The file, with a line break at its end."""

    @abstractmethod
    def expression(self, value: Any) -> str:
        """An expression, or a text, in the words of the format."""

    def full_names(self, resource: Resource) -> list[Any]:
        """The names of a resource's parents, then its own."""
        above = self.full_names(self.tree[resource.parent]) if resource.parent else []
        return [*above, resource.name]


# -- ARM -------------------------------------------------------------------------------------------


class Arm(Format):
    """The JSON of a template, which has no comments: `tree.comment` becomes ``comments``."""

    def text(self) -> str:
        found = {
            "$schema": SCHEMA,
            "contentVersion": "1.0.0.0",
            "metadata": {"description": self.title},
            "parameters": {each.name: self._parameter(each) for each in self.tree.parameters},
            "variables": {name: f"[{each.arm}]" for name, each in self.tree.names.items()},
            "resources": [
                self._resource(each) for each in self.tree.resources if not each.existing
            ],
            "outputs": {
                name: {"type": "string", "value": self.value(value)}
                for name, value in self.tree.outputs.items()
            },
        }
        return json.dumps(found, indent=2, ensure_ascii=False) + "\n"

    def _parameter(self, each: Parameter) -> dict[str, Any]:
        return {
            "type": "secureString" if each.secret else "string",
            "defaultValue": self.value(each.default),
            "metadata": {"description": each.text},
        }

    def _resource(self, each: Resource) -> dict[str, Any]:
        found: dict[str, Any] = {"type": each.kind, "apiVersion": each.api}
        if each.comment:
            found["comments"] = each.comment
        if each.needs:
            checks = [f"not(empty(parameters('{name}')))" for name in each.needs]
            both = f"and({', '.join(checks)})"
            found["condition"] = f"[{checks[0] if len(checks) == 1 else both}]"
        names = [part for name in self.full_names(each) for part in (name, "/")][:-1]
        found["name"] = self.value(Concat(tuple(names)) if len(names) > 1 else names[0])
        if each.scope:
            found["scope"] = f"[{self._id(self.tree[each.scope])}]"
        found |= {name: self.value(value) for name, value in each.body.items()}
        needed = {self._made(each.parent), self._made(each.scope), *self._referred(each)}
        if ids := [f"[{self._id(one)}]" for one in self.tree.resources if one.symbol in needed]:
            found["dependsOn"] = ids
        return found

    def _made(self, symbol: str) -> str:
        """The resource that has to be there first; a service that comes with its account has it."""
        if symbol and (found := self.tree[symbol]).existing:
            return self._made(found.parent)
        return symbol

    def _referred(self, each: Resource) -> set[str]:
        return {self._made(of.symbol) for of in _references([each.name, each.body])}

    def _id(self, resource: Resource) -> str:
        names = ", ".join(self.expression(name) for name in self.full_names(resource))
        return f"resourceId('{resource.kind}', {names})"

    def value(self, value: Any) -> Any:
        """A JSON value; expressions are texts in brackets."""
        found = value
        match value:
            case Note(value=inner):
                found = self.value(inner)
            case str():
                found = f"[{value}" if value[:1] == "[" and value[-1:] == "]" else value
            case tuple():  # the ids of identities
                found = {self.value(each): {} for each in value}
            case Mapping():
                found = {name: self.value(each) for name, each in value.items()}
            case list():
                found = [self.value(each) for each in value]
            case _ if isinstance(value, EXPRESSIONS):
                found = f"[{self.expression(value)}]"
        return found

    def expression(self, value: Any) -> str:
        match value:
            case Param(name):
                place = "variables" if name in self.tree.names else "parameters"
                found = f"{place}('{name}')"
            case Of(symbol, "id"):
                found = self._id(self.tree[symbol])
            case Of(symbol, path):
                other = self.tree[symbol]
                rest = path.removeprefix("properties.")
                found = f"reference({self._id(other)}, '{other.api}').{rest}"
            case Concat(parts):
                found = f"concat({', '.join(map(self.expression, parts))})"
            case Guid(parts):
                found = f"guid({', '.join(map(self.expression, parts))})"
            case RoleId(guid):
                found = f"subscriptionResourceId('{ROLES_TYPE}', '{guid}')"
            case Special(arm=own):
                found = own
            case _:
                found = "'" + str(value).replace("'", "''") + "'"
        return found


def _references(value: Any) -> Iterable[Of]:
    if isinstance(value, Of):
        yield value
    elif isinstance(value, Concat | Guid):
        yield from _references(list(value.parts))
    elif isinstance(value, Note):
        yield from _references(value.value)
    elif isinstance(value, Mapping):
        yield from _references(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _references(each)


# -- Bicep and Terraform ---------------------------------------------------------------------------


class Commented(Format):
    """What the two formats with comments share: objects and lists over several lines."""

    mark = "//"
    between = ": "

    @abstractmethod
    def number(self, value: float) -> str:
        """A number that is no whole one."""

    def key(self, name: str) -> str:
        """The name of a property."""
        return name if _NAME.fullmatch(name) else self.expression(name)

    def value(self, value: Any, indent: int = 0) -> str:
        """A value that begins in the middle of a line, in a block of this indentation."""
        match value:
            case Note(value=inner):
                found = self.value(inner, indent)
            case bool() | int() | None:
                found = json.dumps(value)
            case float():
                found = self.number(value)
            case Mapping():
                found = self.braced("{", self.properties(value, indent + 1), "}", indent)
            case list():
                pad = "  " * (indent + 1)
                lines = [f"{pad}{self.value(each, indent + 1)}{self.comma}" for each in value]
                found = self.braced("[", lines, "]", indent)
            case _:
                found = self.expression(value)
        return found

    comma = ""

    def braced(self, left: str, lines: Sequence[str], right: str, indent: int) -> str:
        """Lines between brackets; empty ones close at once."""
        return "\n".join([left, *lines, "  " * indent + right]) if lines else left + right

    def properties(self, value: Mapping[str, Any], indent: int) -> list[str]:
        """The lines of an object's properties, each with its comment above."""
        lines = []
        for name, each in value.items():
            if isinstance(each, Note):
                lines.append(f"{'  ' * indent}{self.mark} {each.text}")
            shown = self.value(each, indent)
            lines.append(f"{'  ' * indent}{self.key(name)}{self.between}{shown}")
        return lines

    def head(self, each: Resource) -> list[str]:
        """The comment above a resource."""
        return [f"{self.mark} {each.comment}"] if each.comment else []


class Bicep(Commented):
    """Bicep, which ``az deployment group create`` and azd take as it is."""

    def text(self) -> str:
        parts = [f"// {self.title}"]
        for each in self.tree.parameters:
            secure = "@secure()\n" if each.secret else ""
            lines = f"@description({self.expression(each.text)})\n{secure}param {each.name} string"
            parts.append(f"{lines} = {self.expression(each.default)}")
        parts.append("\n".join(f"var {k} = {v.bicep}" for k, v in self.tree.names.items()))
        parts += [self._resource(each) for each in self.tree.resources]
        parts.append(
            "\n".join(
                f"output {name} string = {self.expression(value)}"
                for name, value in self.tree.outputs.items()
            )
        )
        return "\n\n".join(parts) + "\n"

    def _resource(self, each: Resource) -> str:
        body: dict[str, Any] = {}
        if each.parent:
            body["parent"] = Of(each.parent, "")
        if each.scope:
            body["scope"] = Of(each.scope, "")
        body["name"] = each.name
        body |= each.body
        existing = "existing " if each.existing else ""
        checks = " && ".join(f"!empty({name})" for name in each.needs)
        when = f"if ({checks}) " if checks else ""
        head = f"resource {each.symbol} '{each.kind}@{each.api}' {existing}= {when}"
        return "\n".join([*self.head(each), head + self.value(body)])

    def number(self, value: float) -> str:
        return f"json('{value}')"  # Bicep has whole numbers only

    def value(self, value: Any, indent: int = 0) -> str:
        if isinstance(value, tuple):
            ids = [self.expression(Concat((each,))) for each in value]
            lines = [f"{'  ' * (indent + 1)}{each}: {{}}" for each in ids]
            return self.braced("{", lines, "}", indent)
        return super().value(value, indent)

    def expression(self, value: Any) -> str:
        match value:
            case Param(name):
                found = name
            case Of(symbol, path):
                found = f"{symbol}.{path}" if path else symbol
            case Concat(parts):
                found = "'" + "".join(map(self._part, parts)) + "'"
            case Guid(parts):
                found = f"guid({', '.join(map(self.expression, parts))})"
            case RoleId(guid):
                found = f"subscriptionResourceId('{ROLES_TYPE}', '{guid}')"
            case Special(bicep=own):
                found = own
            case _:
                found = f"'{self._part(value)}'"
        return found

    def _part(self, value: Any) -> str:
        if isinstance(value, EXPRESSIONS):
            return f"${{{self.expression(value)}}}"
        text = str(value).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
        return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def snake(name: str) -> str:
    """``workerApp`` as Terraform writes names: ``worker_app``."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1]}", name).lower()


class Terraform(Commented):
    """Terraform with the azapi provider."""

    mark = "#"
    between = " = "
    comma = ","

    def text(self) -> str:
        provider = '{\n      source  = "Azure/azapi"\n      version = "~> 2.0"\n    }'
        parts = [
            f"# {self.title}",
            f"terraform {{\n  required_providers {{\n    azapi = {provider}\n  }}\n}}",
            'data "azapi_client_config" "current" {}',
            'variable "resource_group_id" {\n  description = "Id of the resource group"\n'
            "  type        = string\n}",
            *(self._variable(each) for each in self.tree.parameters),
        ]
        names = {snake(name): each for name, each in self.tree.names.items()}
        parts.append(f"locals {self.block(names)}")
        parts += [self._resource(each) for each in self.tree.resources if not each.existing]
        for name, value in self.tree.outputs.items():
            parts.append(f'output "{snake(name)}" {self.block({"value": value})}')
        return "\n\n".join(parts) + "\n"

    def _variable(self, each: Parameter) -> str:
        found: dict[str, Any] = {"description": each.text, "type": Special("", "", "string")}
        if isinstance(each.default, str):
            found["default"] = each.default
        if each.secret:
            found["sensitive"] = True
        return f'variable "{snake(each.name)}" {self.block(found)}'

    def _resource(self, each: Resource) -> str:
        body = dict(each.body)
        found: dict[str, Any] = {}
        if each.needs:
            checks = [f'var.{snake(name)} != ""' for name in each.needs]
            condition = checks[0] if len(checks) == 1 else " && ".join(checks)
            found["count"] = Special("", "", f"{condition} ? 1 : 0")
        found["type"] = f"{each.kind}@{each.api}"
        found["parent_id"] = self._parent(each)
        found["name"] = each.name
        if "location" in body:
            found["location"] = body.pop("location")
        blocks = []
        if identity := body.pop("identity", None):
            ids = {
                "type": identity["type"],
                "identity_ids": list(identity["userAssignedIdentities"]),
            }
            blocks = ["", f"  identity {self.block(ids, 1)}"]
        found["body"] = body
        exported = [of.path for of in self._used(each.symbol) if of.path.startswith("properties")]
        if exported:
            found["response_export_values"] = sorted(set(exported))
        head = f'resource "azapi_resource" "{snake(each.symbol)}" '
        lines = self.block(found).removesuffix("\n}")
        return "\n".join([*self.head(each), head + lines, *blocks, "}"])

    def _used(self, symbol: str) -> list[Of]:
        values = [[each.name, each.body] for each in self.tree.resources]
        found = _references([values, self.tree.outputs])
        return [each for each in found if each.symbol == symbol]

    def _parent(self, each: Resource) -> Any:
        if each.scope:
            return Of(each.scope)
        if not each.parent:
            return Special("", "", "var.resource_group_id")
        above = self.tree[each.parent]
        if above.existing:
            service = above.kind.rpartition("/")[2]
            return Concat((Of(above.parent), f"/{service}/{above.name}"))
        return Of(each.parent)

    def block(self, value: Mapping[str, Any], indent: int = 0) -> str:
        """A block of arguments: as an object."""
        return self.braced("{", self.properties(value, indent + 1), "}", indent)

    def properties(self, value: Mapping[str, Any], indent: int) -> list[str]:
        """As ``terraform fmt``: the signs of neighbours on one line each stand in one column."""
        rows = [(self.key(name), each, self.value(each, indent)) for name, each in value.items()]
        lines: list[str] = []
        run: list[tuple[str, str]] = []
        pad = "  " * indent

        def flush() -> None:
            width = max((len(name) for name, _ in run), default=0)
            lines.extend(f"{pad}{name:{width}} = {shown}" for name, shown in run)
            run.clear()

        for name, each, shown in rows:
            if isinstance(each, Note):
                flush()
                lines.append(f"{pad}{self.mark} {each.text}")
            run.append((name, shown))
            if "\n" in shown:
                last = run.pop()
                flush()
                lines.append(f"{pad}{last[0]} = {last[1]}")
        flush()
        return lines

    def number(self, value: float) -> str:
        return str(value)

    def expression(self, value: Any) -> str:
        match value:
            case Param(name):
                place = "local" if name in self.tree.names else "var"
                found = f"{place}.{snake(name)}"
            case Of(symbol, path):
                counted = "[0]" if self.tree[symbol].needs else ""
                shown = path if path in {"id", "name"} else f"output.{path}"
                found = f"azapi_resource.{snake(symbol)}{counted}.{shown}"
            case Concat(parts):
                found = '"' + "".join(map(self._part, parts)) + '"'
            case Guid(parts):
                found = f'uuidv5("url", "{"/".join(map(self._part, parts))}")'
            case RoleId(guid):
                subscription = "${data.azapi_client_config.current.subscription_id}"
                found = f'"/subscriptions/{subscription}/providers/{ROLES_TYPE}/{guid}"'
            case Special(terraform=own):
                found = own
            case _:
                found = f'"{self._part(value)}"'
        return found

    def _part(self, value: Any) -> str:
        if isinstance(value, EXPRESSIONS):
            return f"${{{self.expression(value)}}}"
        text = json.dumps(str(value), ensure_ascii=False)[1:-1]
        return text.replace("${", "$${").replace("%{", "%%{")


@dataclass(frozen=True, slots=True)
class Templates:
    """The three texts of one tree."""

    arm: str
    bicep: str
    terraform: str


def templates_of(tree: Tree, title: str) -> Templates:
    """All templates of a tree."""
    return Templates(
        Arm(tree, title).text(), Bicep(tree, title).text(), Terraform(tree, title).text()
    )
