"""The default credential, and logs of the SDKs without their noise and without secrets."""

import importlib
import logging
from types import SimpleNamespace

import pytest

from aztask.azure import access
from aztask.errors import ConfigurationError
from aztask.support.display import SecretFilter


def test_without_azure_identity_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(access.importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r'pip install "aztask\[identity\]"'):
        access.default_credential()


def test_the_credential_is_what_azure_identity_finds(monkeypatch):
    found = object()
    identity = SimpleNamespace(DefaultAzureCredential=lambda: found)
    monkeypatch.setattr(importlib, "import_module", lambda name: identity)
    assert access.default_credential() is found


def test_an_sdk_is_quiet_unless_its_level_was_set():
    silent, asked = logging.getLogger("aztask-test.a"), logging.getLogger("aztask-test.b")
    asked.setLevel(logging.DEBUG)
    access.quiet_sdk(silent.name)
    access.quiet_sdk(asked.name)
    assert not silent.isEnabledFor(logging.ERROR)
    assert asked.isEnabledFor(logging.DEBUG)


def test_secrets_are_masked_once(caplog):
    access.filter_secrets()
    access.filter_secrets()
    logger = logging.getLogger("urllib3.connectionpool")
    assert sum(isinstance(each, SecretFilter) for each in logger.filters) == 1
    with caplog.at_level(logging.WARNING, logger.name):
        logger.warning("GET /q?sv=1&sig=%s", "c2VjcmV0c2VjcmV0c2VjcmV0")
    assert "c2VjcmV0" not in caplog.text
