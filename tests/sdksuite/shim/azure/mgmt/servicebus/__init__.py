"""The management client: namespaces, queues, topics and keys, created in the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from azure.core.exceptions import ResourceNotFoundError

from tests.sdksuite.service import (
    HOST,
    POLICY,
    administration,
    connection_string,
    key_of,
    rule_name,
)


def _keys(name: str, entity: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        primary_connection_string=connection_string(name, entity),
        key_name=name,
        primary_key=key_of(name),
    )


def _settings(model: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(model).items() if value is not None}


class _Namespaces:
    """One namespace, which is always there, and its keys."""

    def __init__(self) -> None:
        self._rights: dict[str, str] = {}

    def begin_create_or_update(self, *_parameters: Any) -> SimpleNamespace:
        """The namespace; its name is the emulator's host."""
        return SimpleNamespace(result=lambda: SimpleNamespace(name=HOST))

    def create_or_update_authorization_rule(
        self, _group: str, _namespace: str, name: str, model: Any
    ) -> SimpleNamespace:
        """A key for the whole namespace."""
        self._rights[name] = rule_name([str(right) for right in model.rights])
        return SimpleNamespace(name=name)

    def delete_authorization_rule(self, *_names: str) -> None:
        """The key stays until the tests end."""

    def list_keys(self, _group: str, _namespace: str, name: str) -> SimpleNamespace:
        """The key, the main one if it is no other."""
        return _keys(self._rights.get(name, POLICY))

    def delete(self, _group: str, _name: str) -> None:
        """The emulator ends with the tests."""


class _Queues:
    """Queues and their keys."""

    def __init__(self) -> None:
        self._rights: dict[str, str] = {}

    def create_or_update(self, _group: str, _namespace: str, name: str, model: Any) -> Any:
        """A new queue."""
        with administration() as client:
            return client.create_queue(name, **_settings(model))

    def delete(self, _group: str, _namespace: str, name: str) -> None:
        """Delete a queue; a test may have done so."""
        with administration() as client:
            _unless_missing(client.delete_queue, name)

    def create_or_update_authorization_rule(
        self, _group: str, _namespace: str, _queue: str, name: str, model: Any
    ) -> SimpleNamespace:
        """A key for this queue; the emulator's keys are the namespace's."""
        self._rights[name] = rule_name([str(right) for right in model.rights])
        return SimpleNamespace(name=name)

    def delete_authorization_rule(self, *_names: str) -> None:
        """The key stays until the tests end."""

    def list_keys(self, _group: str, _namespace: str, queue: str, name: str) -> SimpleNamespace:
        """The key, in a connection string for this queue only."""
        return _keys(self._rights[name], queue)


class _Topics:
    """Topics."""

    def create_or_update(self, _group: str, _namespace: str, name: str, _model: Any) -> Any:
        """A new topic."""
        with administration() as client:
            return client.create_topic(name)

    def delete(self, _group: str, _namespace: str, name: str) -> None:
        """Delete a topic; a test may have done so."""
        with administration() as client:
            _unless_missing(client.delete_topic, name)


class _Subscriptions:
    """Subscriptions."""

    def create_or_update(
        self, _group: str, _namespace: str, topic: str, name: str, model: Any
    ) -> Any:
        """A new subscription."""
        with administration() as client:
            return client.create_subscription(topic, name, **_settings(model))

    def delete(self, _group: str, _namespace: str, topic: str, name: str) -> None:
        """Delete a subscription; a test may have done so."""
        with administration() as client:
            _unless_missing(client.delete_subscription, topic, name)


def _unless_missing(delete: Any, *names: str) -> None:
    try:
        delete(*names)
    except ResourceNotFoundError:
        return


class ServiceBusManagementClient:
    """The client of namespaces and what is in them."""

    def __init__(self) -> None:
        self.namespaces = _Namespaces()
        self.queues = _Queues()
        self.topics = _Topics()
        self.subscriptions = _Subscriptions()
