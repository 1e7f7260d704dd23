"""Tells a broken connection from a bug among the errors that the SDK's handlers meet.

The SDK reports a broken connection mostly as an error of its own, or as an OSError. In a few places
it raises an error of Python instead, such as a ValueError. It also wraps every error that it does
not know, a bug as well, as ``ServiceBusError("Handler failed: ...")``, which looks like an outage.

Rules
1. An error of Python is a broken connection only if its type and the place that raised it are one
   of the symptoms here. Each one was seen when connections were cut or their bytes replaced, or
   stands in the SDK's source ([seen] azure-servicebus 7.15).
2. Any other error of Python is a bug, in the SDK or here. It is raised as it is, with its
   traceback, and it is not retried as an outage. The connection is closed: its state is unknown.
3. Only our own handlers are changed, not the SDK's classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import azure.servicebus
from azure.servicebus import ServiceBusReceiver, ServiceBusSender
from azure.servicebus.exceptions import ServiceBusConnectionError

PYTHON_ERRORS: Final = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, NameError, RuntimeError, EOFError, BufferError, struct.error),
)
"""Errors of Python, which a bug raises as well. OSError is none of them: it is the socket's."""

_SDK: Final = Path(azure.servicebus.__file__).parent
_OURS: Final = Path(__file__).parent


class _Place(NamedTuple):
    """Where an error passed. file: relative to the SDK's package; "" for a file outside of it."""

    file: str
    function: str
    private: bool = False  # our module that uses the parts of the SDK's handlers
    ours: bool = False  # any module of this adapter


_READING: Final = ("_read_frame", "_process_incoming_frame", "receive_frame")
"""The SDK's functions that read a connection. What they cannot read, or what makes no sense in the
state of the connection, was damaged on its way or is not AMQP: neither can the rest be read."""

_RAISED: Final[Sequence[tuple[Any, str, tuple[str, ...]]]] = (
    # What answers at the address does not speak AMQP.
    (ValueError, "_pyamqp/_connection.py", ("_connect",)),
    ((ValueError, TypeError, IndexError, NotImplementedError), "_pyamqp/sasl.py", ("_negotiate",)),
    # The service closed the management link while a request waited for its answer.
    (ValueError, "_pyamqp/management_operation.py", ("execute",)),
    # The service detached the link.
    (ValueError, "_pyamqp/link.py", ("attach",)),
    (ValueError, "_pyamqp/receiver.py", ("send_disposition",)),
    # The public call that settles met a connection that was lost.
    (RuntimeError, "_transport/_pyamqp_transport.py", ("settle_message_via_receiver_link",)),
)
"""Types, file of the SDK, and functions that raise the error for a broken connection only."""


def tell_apart(handler: ServiceBusReceiver | ServiceBusSender) -> None:
    """Make this handler of the SDK raise bugs as they are, and broken connections as its own error.

    Without the SDK's private methods nothing is changed: then a bug looks like an outage.
    """
    link: Any = handler
    handle = getattr(link, "_handle_exception", None)
    check_live = getattr(link, "_check_live", None)
    if handle is None or check_live is None:
        return

    def told_apart(error: BaseException) -> Any:
        if not isinstance(error, PYTHON_ERRORS) or type(error).__module__.startswith("azure."):
            return handle(error)
        if is_symptom(error, link):
            return handle(_broken(error))
        with suppress(Exception):  # rule 2; the first error is the one to tell
            link._close_handler()
        raise error

    def checked_live() -> None:
        try:
            check_live()
        except ValueError as error:  # raised only for a handler that was closed
            raise _broken(error) from None

    link._handle_exception, link._check_live = told_apart, checked_live


def _broken(error: Exception) -> ServiceBusConnectionError:
    text = f"the connection broke ({type(error).__name__}: {error})"
    return ServiceBusConnectionError(message=text, error=error)


def is_symptom(error: Exception, handler: Any) -> bool:
    """Whether an error of Python, as it was caught, shows that the handler's connection broke."""
    places = list(_places(error.__traceback__))
    if not places:
        return False
    last = places[-1]
    if isinstance(error, AttributeError) and error.obj is None:
        # Another thread, or the SDK itself, closed the handler and took away its parts.
        return bool(last.file or last.private) and _is_dismantled(handler)
    read = [i for i, each in enumerate(places) if each.file and each.function in _READING]
    if read:
        return not any(each.ours for each in places[read[-1] :])
    return any(
        isinstance(error, kinds) and last.file == file and last.function in functions
        for kinds, file, functions in _RAISED
    )


def _is_dismantled(handler: Any) -> bool:
    """Whether the handler has no open connection: it was closed, or opening it has failed."""
    inner = getattr(handler, "_handler", None)
    running = getattr(handler, "_running", False)
    return not running or getattr(inner, "_connection", None) is None


def _places(trace: TracebackType | None) -> Iterator[_Place]:
    """The places that an error passed, the outermost first."""
    while trace is not None:
        code = trace.tb_frame.f_code
        path = Path(code.co_filename)
        file = path.relative_to(_SDK).as_posix() if path.is_relative_to(_SDK) else ""
        ours = path.parent == _OURS
        yield _Place(file, code.co_name, ours and path.name == "private.py", ours)
        trace = trace.tb_next
