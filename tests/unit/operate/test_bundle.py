"""``aztask doctor --bundle``: what is in it, and that no secret is, wherever one comes from."""

from __future__ import annotations

import base64
import json
import stat
import sys
import zipfile

import pytest

from aztask import App
from aztask.operate.bundle import bundle, write_bundle
from aztask.support.display import Secret
from aztask.support.finding import fine, problem

KEY = base64.b64encode(bytes(range(200, 232))).decode()
SIGNING = "signing-key-of-this-test-0123456789"
ENCRYPTION = "first:" + "AB" * 21 + "A="
PASSWORD = 'a password\n"with" line breaks'
ADDRESS = (
    f"Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=worker;SharedAccessKey={KEY}"
)
ENVIRONMENT = {
    "AZTASK_BROKER": ADDRESS,
    "AZTASK_SIGNING_KEYS": SIGNING,
    "AZTASK_ENVIRONMENT": "prod",
    "AZURE_CLIENT_SECRET": "client-secret-0001",
    "AZURE_CLIENT_ID": "11111111-2222-3333-4444-555555555555",
    "HTTPS_PROXY": "http://ann:pr0xy-pass@proxy.example:8080",
    "DATABASE_PASSWORD": PASSWORD,
    "SHOP_TOKEN": "tok-77",
    "HOME": "/home/ann",
}
SECRETS = [KEY, SIGNING, "client-secret-0001", "pr0xy-pass", PASSWORD, "tok-77", "zz"]


@pytest.fixture
def files():
    app = App(
        "shop",
        broker=ADDRESS,
        results="local://:memory:",
        signing_keys=[Secret(SIGNING)],
        id_key=Secret("zz" * 16),
        payloads="shop",
        payloads_account=f"DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={'QUJD' * 8}",
    )

    @app.task(queue="orders")
    def ship(order: int) -> None: ...

    findings = [
        fine("broker", "broker", f"an address with {KEY} in it"),
        problem("app", "settings", f"it says {PASSWORD}", "tok-77", ValueError(SIGNING)),
    ]
    yield bundle(app, findings, ENVIRONMENT)
    app.close()


def test_no_secret_is_in_it_in_any_form(files):
    for name, text in files.items():
        for secret in [*SECRETS, "zz" * 16, "QUJD" * 8]:
            if secret == "zz":  # too short to be replaced everywhere, but never written
                continue
            for form in (secret, json.dumps(secret)[1:-1], secret.encode().hex()):
                assert form not in text, (name, secret)


def test_it_says_what_a_bug_report_needs(files):
    found = {name: json.loads(text) for name, text in files.items()}
    assert found["versions.json"]["python"].endswith(sys.version.split()[0].rstrip("+"))
    assert found["versions.json"]["libraries"]["azure-servicebus"]
    assert found["queues.json"]["orders"]["lease"] == 60.0
    assert list(found["tasks.json"].values()) == ["orders"]
    assert [each["level"] for each in found["findings.json"]] == ["ok", "problem"]
    assert found["settings.json"]["app"] == "shop"
    assert found["settings.json"]["broker"].startswith("Endpoint=sb://shop.servicebus.windows.net")
    assert found["settings.json"]["signing_keys"] == ["****"]


def test_of_variables_it_has_names_and_values_of_settings_alone(files):
    found = json.loads(files["variables.json"])
    assert found == {
        "AZTASK_BROKER": "set",
        "AZTASK_ENVIRONMENT": "prod",
        "AZTASK_SIGNING_KEYS": "set",
        "AZURE_CLIENT_ID": "set",
        "AZURE_CLIENT_SECRET": "set",
        "HTTPS_PROXY": "set",
    }


def test_the_file_is_new_and_private(files, tmp_path):
    path = tmp_path / "bundle.zip"
    write_bundle(path, files)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [f"aztask-bundle/{name}" for name in files]
        assert archive.read("aztask-bundle/tasks.json").decode() == files["tasks.json"]
    with pytest.raises(FileExistsError):
        write_bundle(path, files)
