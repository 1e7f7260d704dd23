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


@pytest.mark.parametrize(
    ("host", "discovers"),
    [
        ("", True),
        ("https://login.microsoftonline.com/", True),
        ("login.microsoftonline.us", True),
        ("https://login.chinacloudapi.cn", True),
        ("https://login.shop.example:8443/", False),
        ("https://login.microsoftonline.com.example.org", False),
        ("127.0.0.1:8443", False),
    ],
)
def test_only_hosts_that_are_microsofts_are_looked_up_there(host, discovers, monkeypatch):
    made = []

    def keep(*given, **options):
        made.append((given, options))

    identity = SimpleNamespace(
        DefaultAzureCredential=keep, ClientSecretCredential=keep, ManagedIdentityCredential=keep
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: identity)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", host)
    access.default_credential()
    access.named_credential("tenant/client/se/cret")
    access.named_credential("client")
    wanted = {} if discovers else {"disable_instance_discovery": True}
    assert made == [
        ((), wanted),
        (("tenant", "client", "se/cret"), wanted),
        ((), {"client_id": "client"}),
    ]


CHAIN = (
    "DefaultAzureCredential failed to retrieve a token from the included credentials.\n"
    "Attempted credentials:\n"
    "\tEnvironmentCredential: EnvironmentCredential authentication unavailable.\nVisit https://x\n"
    "{more}"
    "To mitigate this issue, please refer to pages"
)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            "\tWorkloadIdentityCredential: AADSTS7000215: Invalid secret\nContent: {}\n",
            "WorkloadIdentityCredential: AADSTS7000215: Invalid secret",
        ),
        (
            "",
            "no credential is configured here; EnvironmentCredential: EnvironmentCredential "
            "authentication unavailable.",
        ),
    ],
)
def test_of_a_chain_the_credential_is_told_that_counts(more, told):
    assert access.token_trouble(CHAIN.replace("{more}", more)) == told


def test_of_one_credential_the_first_line_is_told_without_its_secrets():
    text = "refused: client_secret=c2VjcmV0c2VjcmV0c2VjcmV0\nand why, for pages"
    assert access.token_trouble(text).startswith("refused: ")
    assert "pages" not in access.token_trouble(text)
    assert len(access.token_trouble("x" * 1000)) == access.TROUBLE_LIMIT
