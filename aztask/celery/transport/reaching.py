"""What a connection does before its first request: is the service there, and who logs requests."""

from __future__ import annotations

import logging
import os
import socket
from typing import Final
from urllib.request import getproxies

from aztask.errors import BrokerUnavailable
from aztask.queues.base import Broker, Networked

REQUEST_LOG: Final = "azure.core.pipeline.policies.http_logging_policy"
"""azure-core logs each request and each answer there, at INFO."""

LONGEST_CHECK: Final = 10.0

_OTHER_WAYS: Final = ("AZTASK_SERVICEBUS_TRANSPORT", "AZTASK_SERVICEBUS_ENDPOINT")


def check_reachable(broker: Broker, seconds: float | None) -> None:
    """Raise BrokerUnavailable unless the service's host accepts a TCP connection.

    It costs nothing and sends nothing, so it proves neither the credentials nor the queues. It is
    skipped where the service is not reached directly: through a proxy, or another endpoint.

    * `seconds`: the time-out; None for `LONGEST_CHECK`.
    """
    if not isinstance(broker, Networked):
        return
    if getproxies() or any(os.environ.get(name) for name in _OTHER_WAYS):
        return
    host, port = broker.server
    port = port or broker.capabilities.port
    try:
        socket.create_connection((host, port), min(seconds or LONGEST_CHECK, LONGEST_CHECK)).close()
    except OSError as error:
        raise BrokerUnavailable(
            f"{host}:{port} does not accept connections: {error.strerror or error}; check the"
            " address, the network and the firewall"
        ) from error


def quiet_requests(broker: Broker) -> None:
    """Keep azure-core's lines about each request out of the log.

    Celery logs everything from INFO on. Your own level for that logger is left as it is.
    """
    log = logging.getLogger(REQUEST_LOG)
    if broker.capabilities.remote and log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)
