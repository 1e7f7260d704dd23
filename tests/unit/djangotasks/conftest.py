"""Django with the settings of `djangosite`, set up once for the process."""

import os

import django
import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

os.environ["DJANGO_SETTINGS_MODULE"] = "djangosite.settings"
django.setup()
del os.environ["DJANGO_SETTINGS_MODULE"]  # programs that other tests start have their own


@pytest.fixture(autouse=True)
def private_queues(tmp_path, settings_of):
    """The backend of each test has a file of its own."""
    with settings_of():
        yield


@pytest.fixture
def settings_of(tmp_path):
    """Make `override_settings` with options for the default backend."""
    address = f"local://{tmp_path}/queues.db"

    def override(alias="default", *, queues=("default", "queue_1"), **options):
        params = {
            "BACKEND": "aztask.django.backend.AztaskBackend",
            "QUEUES": list(queues),
            "OPTIONS": {"broker": address, "results": address, **options},
        }
        return override_settings(TASKS={**settings.TASKS, alias: params})

    return override


@pytest.fixture
def database(tmp_path):
    """A database in a file of the test."""
    wrapper = connections["default"]
    wrapper.close()
    before, wrapper.settings_dict["NAME"] = wrapper.settings_dict["NAME"], tmp_path / "site.sqlite3"
    try:
        yield wrapper
    finally:
        wrapper.close()
        wrapper.settings_dict["NAME"] = before
