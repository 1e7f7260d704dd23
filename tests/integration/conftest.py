"""Fixtures of the integration tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite, running
from harness import Site, site_in
from proxy import Proxy
from storage import storage_site

from aztask.testing import RunningEmulator, emulator
from aztask.worker.platform import is_portable

WAITING = (
    "test_an_outage_of_the_service_loses_nothing",
    "test_a_task_ten_leases_long_runs_once_while_replies_are_late",
    "test_a_task_ten_locks_long_runs_once_while_every_third_renewal_gets_no_answer",
    "test_renewals_that_fail_raise_the_lease_until_nothing_is_lost",
    "test_killed_at_each_step",
    "test_a_task_ten_locks_long_runs_once",
)


# These take most of the time, because they wait for leases to end and for services to come back.
# `tox -e kills` runs them, and the files whose names end with "_kills"; tests/integration without
# "-m" runs all.
KILLS = {
    "test_adaptive_leases",
    "test_broken_pool",
    "test_damaged_rows",
    "test_drain",
    "test_drain_rounds",
    "test_every_thread",
    "test_first_process",
    "test_hostile_stream",
    "test_limits_on_azure",
    "test_probes",
    "test_servicebus_faults",
    "test_servicebus_killed",
    "test_servicebus_lock",
    "test_session_chaos",
    "test_storage_faults",
    "test_storage_requests",
    "test_storage_worker",
    "test_strategies_chaos",
    "test_tables_faults",
    "test_tables_worker",
    "test_thawed_claims",
    "test_worker_loop",
}


# Whole applications: the examples, and those of Celery, Django and FastAPI.
# `tox -e applications` runs them.
APPLICATIONS = {
    "test_celery",
    "test_celery_backend",
    "test_celery_beat",
    "test_celery_beside",
    "test_celery_periodic",
    "test_celery_pools",
    "test_deploy",
    "test_django_worker",
    "test_documentation_site",
    "test_embedded",
    "test_example_chat",
    "test_example_compose",
    "test_example_django",
    "test_example_fastapi",
    "test_example_folders",
    "test_example_reporting",
    "test_example_shop",
    "test_examples",
    "test_from_celery",
    "test_init",
    "test_kombu_addresses",
    "test_servicebus_kombu",
    "test_storage_kombu",
}


# What a feature promises, each with real workers. `tox -e features` runs them.
FEATURES = {
    "test_async_tasks",
    "test_breakers",
    "test_limits",
    "test_pausing",
    "test_scaling",
    "test_schedules",
    "test_session_tasks",
    "test_strategies",
    "test_unique_tasks",
    "test_workflow_unique",
}


# Workers in processes that lack what other systems lack. `tox -e platforms` runs them.
PLATFORMS = {"test_other_platforms", "test_portable"}


# Workers and commands on Service Bus and on Azure Storage: most of their time is the services'.
# `tox -e services` runs them, and of the other files those cases whose name is of a service; only
# IN_BRIEF is tried on each broker in the default run.
SERVICES = ("test_servicebus_", "test_storage_", "test_tables_")
ON_A_SERVICE = re.compile("service.?bus|storage.?queue|tables", re.IGNORECASE)
IN_BRIEF = {"test_foreign_messages", "test_priorities"}
SERVICE_FILES = {
    "test_attackers",
    "test_azure_telemetry",
    "test_doctor",
    "test_event_upload",
    "test_foreign_queues",
    "test_leaseblob",
    "test_schedules_long",
    "test_traces",
    "test_workflow_requests",
}


ELSEWHERE = ("kills", "applications", "features", "platforms", "uwsgi")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits longest is spread evenly: several processes share the list, in long pieces, and
    none is to be alone with such a test at the end, or all to wait at once.
    """
    for item in items:
        if item.path.stem in KILLS or item.path.stem.endswith("_kills"):
            item.add_marker("kills")
        if item.path.stem in APPLICATIONS:
            item.add_marker("applications")
        if item.path.stem in FEATURES:
            item.add_marker("features")
        if item.path.stem in PLATFORMS:
            item.add_marker("platforms")
        if (
            item.path.stem.startswith(SERVICES)
            or item.path.stem in SERVICE_FILES
            or (
                ON_A_SERVICE.search(item.name)
                and item.path.stem not in IN_BRIEF
                and not any(map(item.get_closest_marker, ELSEWHERE))
            )
        ):
            item.add_marker("services")
    waiting = [item for item in items if item.name in WAITING]
    items[:] = [item for item in items if item.name not in WAITING]
    step = len(items) // (len(waiting) or 1)
    for number, item in enumerate(waiting):
        items.insert(number * (step + 1) + number % 3 * step // 4, item)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is of the fork server alone, where workers have the portable shell."""
    marker = item.get_closest_marker("fork_server")
    if marker is not None and is_portable():
        pytest.skip(f"only of the fork server: {marker.args[0]}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A broker and a result store in one file; workers are killed at the end."""
    with site_in(tmp_path / "site") as made:
        yield made


@pytest.fixture
def split_site(tmp_path: Path) -> Iterator[Site]:
    """A broker and a result store in two files: no common transaction."""
    with site_in(tmp_path / "site", joint=False) as made:
        yield made


@pytest.fixture(scope="module")
def azurite(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Azurite]:
    """Azurite's queue service, or what the file of tests calls its `SERVICE`; one for each file."""
    service = getattr(request.module, "SERVICE", "queue")
    with running(tmp_path_factory.mktemp("azurite"), service=service) as server:
        yield server


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningEmulator]:
    """A Service Bus, one for each file of tests."""
    with emulator() as running_emulator:
        yield running_emulator


@pytest.fixture
def proxy(azurite: Azurite) -> Iterator[Proxy]:
    """In front of Azurite."""
    made = Proxy(azurite.port)
    yield made
    made.close()


@pytest.fixture
def proxied_site(azurite: Azurite, proxy: Proxy, tmp_path: Path) -> Iterator[Site]:
    """Workers reach a new queue on Azurite through the proxy, the test past it."""
    with storage_site(tmp_path / "site", azurite, port=proxy.port, past=True) as made:
        yield made
