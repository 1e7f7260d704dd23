"""What the SDK's suite uses of its unpublished helpers; every test is live."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from azure.servicebus._base_handler import ServiceBusSharedKeyCredential
from azure.servicebus.aio._base_handler_async import (
    ServiceBusSharedKeyCredential as AsyncSharedKeyCredential,
)

from tests.sdksuite.service import HOST, KEY, POLICY, connection_string

__all__ = [
    "AzureMgmtPreparer",
    "AzureMgmtRecordedTestCase",
    "AzureRecordedTestCase",
    "AzureTestError",
    "CachedResourceGroupPreparer",
    "FakeResource",
    "PowerShellPreparer",
    "RandomNameResourceGroupPreparer",
    "ReservedResourceNameError",
    "add_general_regex_sanitizer",
    "get_credential",
    "get_region_override",
    "recorded_by_proxy",
    "set_custom_default_matcher",
]


class AzureTestError(Exception):
    """A test cannot be prepared."""


class ReservedResourceNameError(Exception):
    """A name that Azure keeps for itself."""


class AzureRecordedTestCase:
    """A class of tests."""

    is_live = True

    @staticmethod
    def await_prepared_test(test: Callable[..., Any]) -> Callable[..., Any]:
        """The test itself: pytest runs coroutines."""
        return test


AzureMgmtRecordedTestCase = AzureRecordedTestCase


class FakeResource:
    """A resource by its name and id."""

    def __init__(self, name: str, id: str) -> None:
        self.name = name
        self.id = id


def get_credential(*, is_async: bool = False, **_options: Any) -> Any:
    """Microsoft's is an Entra ID token. The emulator cannot verify one: this is its key."""
    return (AsyncSharedKeyCredential if is_async else ServiceBusSharedKeyCredential)(POLICY, KEY)


def get_region_override(default: str) -> str:
    """Regions make no difference."""
    return default


def set_custom_default_matcher(**_options: Any) -> None:
    """Nothing is recorded."""


def add_general_regex_sanitizer(**_options: Any) -> None:
    """Nothing is recorded."""


def recorded_by_proxy(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test itself."""
    return test


def _accepted(test: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that the test takes."""
    parameters = inspect.signature(test).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


class _Preparer:
    """A decorator that creates something before a test, hands it on, and removes it after.

    provides: parameters of the test that have no default.
    """

    provides: frozenset[str] = frozenset()

    def _prepare(self, **_known: Any) -> dict[str, Any]:
        return {}

    def _remove(self, **_known: Any) -> None:
        pass

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            async def prepared(case: Any, **known: Any) -> None:
                known |= self._prepare(**known)
                try:
                    await test(case, **_accepted(test, known))
                finally:
                    self._remove(**known)
        else:

            def prepared(case: Any, **known: Any) -> None:  # type: ignore[misc]
                known |= self._prepare(**known)
                try:
                    test(case, **_accepted(test, known))
                finally:
                    self._remove(**known)

        functools.update_wrapper(prepared, test)
        shown = inspect.signature(test)  # to pytest, which takes parameters for fixtures
        left = [each for name, each in shown.parameters.items() if name not in self.provides]
        prepared.__signature__ = shown.replace(parameters=left)  # type: ignore[attr-defined]
        return prepared


class AzureMgmtPreparer(_Preparer):
    """The base of the suite's own preparers, which say how their resource is created.

    Nothing is cached: each test has queues and topics of its own.
    """

    is_live = True

    def __init__(
        self,
        name_prefix: str = "",
        random_name_length: int = 24,
        *,
        random_name_enabled: bool = True,
        **_options: Any,
    ) -> None:
        self.name_prefix = name_prefix
        self.random_name_enabled = random_name_enabled
        self.resource_moniker = name_prefix
        self.resource: Any = None
        self._length = random_name_length
        self._name = ""

    @property
    def moniker(self) -> str:
        """What a recording would call the resource."""
        return self.resource_moniker

    def set_cache(self, *_key: Any) -> None:
        """Each test has its own."""

    def create_mgmt_client(self, kind: Callable[[], Any], **_options: Any) -> Any:
        """A management client."""
        return kind()

    def _prepare(self, **known: Any) -> dict[str, Any]:
        self._name = f"{self.name_prefix}{uuid.uuid4().hex}"[: max(self._length, 12)]
        return dict(self.create_resource(self._name, **known))  # type: ignore[attr-defined]

    def _remove(self, **known: Any) -> None:
        self.remove_resource(self._name, **known)  # type: ignore[attr-defined]


class _ResourceGroupPreparer(_Preparer):
    """A resource group, which nobody looks at."""

    def __init__(self, **_options: Any) -> None:
        pass


CachedResourceGroupPreparer = RandomNameResourceGroupPreparer = _ResourceGroupPreparer


class PowerShellPreparer(_Preparer):
    """Values of a deployment that others made; those that name the namespace are the emulator's."""

    def __init__(self, _service: str, **values: Any) -> None:
        known = {
            "servicebus_connection_str": connection_string(),
            "servicebus_fully_qualified_namespace": HOST,
            "servicebus_sas_policy": POLICY,
            "servicebus_sas_key": KEY,
        }
        self._values = values | known
        self.provides = frozenset(self._values)

    def _prepare(self, **_known: Any) -> dict[str, Any]:
        return self._values
