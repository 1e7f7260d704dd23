"""The real Service Bus broker over the modelled service.

Rules
1. The adapter's threads are replaced by calls: a control connection carries out its work when it is
   posted, a connection is closed at once, and a search for the service's time is one attempt.
2. Everything is replaced for the links of this module only: a real broker in the same process is as
   before.
3. Mailboxes are not modelled: they are topics of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from math import inf
from types import SimpleNamespace
from typing import Any, Final

from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import BrokerUnavailable
from aztask.queues.base import AnySession
from aztask.queues.servicebus import private
from aztask.queues.servicebus.admin import Administration
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.servicebus.client import REQUEST_SECONDS, BusClient
from aztask.queues.servicebus.control import Control
from aztask.queues.servicebus.inspection import Peeking
from aztask.queues.servicebus.lock import LockWatch
from aztask.support.display import Secret

from .azureerrors import ask
from .bus import BusQueue, BusSettings, ServiceBus, State
from .buslinks import ModelLink, ModelReceiver
from .wire import Line, Refused, Service

ADDRESS: Final = ServiceBusAddress(
    "simulated.servicebus.windows.net", key_name="k", key=Secret("a2V5a2V5a2V5")
)
MANAGE_SECONDS: Final = 60.0


class ModelBus(BusClient):
    """The adapter's client: it makes links.

    * `links`: those that are open, or were when they were last used.
    """

    def __init__(self, service: ServiceBus, line: Line, tick: float) -> None:
        self.address = ADDRESS
        self.links: list[ModelLink] = []
        self._service = service
        self._line = line
        self._tick = tick

    def sender(self, queue: str) -> Any:
        return self._made(ModelLink(self._service, self._line, queue, tick=self._tick))

    def receiver(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        delete: bool = False,
        session: str | AnySession | None = None,
        request_seconds: float = REQUEST_SECONDS,
        session_wait: float | None = None,
    ) -> Any:
        kind = ModelReceiver if session is None else ModelLink
        link = kind(
            self._service,
            self._line,
            queue,
            tick=self._tick,
            dead=dead_letter,
            delete=delete,
            session=session,
            request_seconds=request_seconds,
            session_wait=session_wait,
        )
        return self._made(link)

    def _made(self, link: ModelLink) -> ModelLink:
        self.links = [each for each in self.links if each._running]
        self.links.append(link)
        return link

    def close(self, handler: Any) -> None:
        handler.end()

    def drop(self, handler: Any) -> None:
        handler.end()

    def finish(self) -> None:
        """Everything is closed at once."""


class ModelAdministration(Administration):
    """The adapter's administration, over the modelled one."""

    def __init__(self, service: ServiceBus, line: Line) -> None:
        super().__init__(ADDRESS)
        self._model: Any = ModelAdmin(service, line)

    def _open(self) -> Any:
        return self._model

    def close(self) -> None:
        """There are no connections."""


class ModelAdmin:
    """The SDK's administration client."""

    def __init__(self, service: ServiceBus, line: Line) -> None:
        self._service = service
        self._line = line

    def create_queue(self, name: str, **settings: Any) -> None:
        def execute() -> None:
            if name in self._service.queues:
                raise Refused(409, "Conflict")
            self._service.queues[name] = BusQueue(_settings(BusSettings(), settings))

        self._ask("create", execute, name)

    def update_queue(self, known: Any) -> None:
        def execute() -> None:
            _settings(self._service.queue(known.name).settings, vars(known))

        self._ask("update", execute, known.name)

    def delete_queue(self, name: str) -> None:
        def execute() -> None:
            self._service.queue(name)
            del self._service.queues[name]

        self._ask("delete queue", execute, name)

    def get_queue(self, name: str) -> Any:
        return self._ask("settings", lambda: _shown(name, self._service.queue(name)), name)

    def list_queues(self) -> list[Any]:
        names = self._ask("list", lambda: list(self._service.queues), "")
        return [SimpleNamespace(name=name) for name in names]

    def get_queue_runtime_properties(self, name: str) -> Any:
        return self._ask("counts", lambda: _counts(self._service.queue(name)), name)

    def get_namespace_properties(self) -> Any:
        return SimpleNamespace(messaging_sku="Standard")

    def _ask(self, operation: str, execute: Callable[[], Any], name: str) -> Any:
        try:
            return ask(self._line, Service.BUS, operation, execute, name, MANAGE_SECONDS)
        except HttpResponseError as error:
            kinds = {404: ResourceNotFoundError, 409: ResourceExistsError}
            raise kinds.get(error.status_code or 0, HttpResponseError)(
                message=error.message, response=error.response
            ) from None


def _settings(kept: BusSettings, given: dict[str, Any]) -> BusSettings:
    """Apply settings as the SDK names them."""
    kept.lock_seconds = _seconds(given.get("lock_duration"), kept.lock_seconds)
    kept.max_deliveries = given.get("max_delivery_count", kept.max_deliveries)
    kept.time_to_live = _seconds(given.get("default_message_time_to_live"), kept.time_to_live)
    kept.buries_expired = given.get("dead_lettering_on_message_expiration", kept.buries_expired)
    kept.sessions = given.get("requires_session", kept.sessions)
    if given.get("requires_duplicate_detection"):
        kept.window = _seconds(given.get("duplicate_detection_history_time_window"), 600.0)
    return kept


def _seconds(given: timedelta | None, otherwise: float) -> float:
    return otherwise if given is None else given.total_seconds()


def _shown(name: str, queue: BusQueue) -> Any:
    settings = queue.settings
    life = None if settings.time_to_live == inf else timedelta(seconds=settings.time_to_live)
    return SimpleNamespace(
        name=name,
        lock_duration=timedelta(seconds=settings.lock_seconds),
        max_delivery_count=settings.max_deliveries,
        default_message_time_to_live=life,
        dead_lettering_on_message_expiration=settings.buries_expired,
        requires_session=settings.sessions,
        requires_duplicate_detection=settings.window > 0,
        duplicate_detection_history_time_window=timedelta(seconds=settings.window or 600.0),
    )


def _counts(queue: BusQueue) -> Any:
    """The service counts locked and deferred messages as active."""
    messages = queue.living.messages.values()
    scheduled = sum(each.state is State.SCHEDULED for each in messages)
    return SimpleNamespace(
        active_message_count=len(messages) - scheduled,
        scheduled_message_count=scheduled,
        dead_letter_message_count=len(queue.dead.messages),
    )


# -- what runs at once ---------------------------------------------------------------------------


class InlineWatch(LockWatch):
    """A search for the service's time is one attempt."""

    def _start_search(self) -> None:
        if not self._closed:
            self._search_once(0.0)


class ModelBroker(ServiceBusBroker):
    """The real broker, whose links are modelled."""

    def __init__(self, service: ServiceBus, line: Line, tick: float) -> None:
        super().__init__(ADDRESS, clock=line.clock)
        self._client._closer.close()
        self._client = self._bus = ModelBus(service, line, tick)
        self._admin = ModelAdministration(service, line)
        self._peeking = Peeking(self._client)

    def _watch(self, queue: str, lease: float, *, in_session: bool) -> LockWatch:
        watch = super()._watch(queue, lease, in_session=in_session)
        watch.__class__ = InlineWatch
        return watch

    def cut(self) -> None:
        """All its connections end, as when the program dies."""
        for link in self._bus.links:
            link.end()


def service_bus_broker(service: ServiceBus, line: Line, *, tick: float = inf) -> ModelBroker:
    """A real broker of one program, on its clock.

    tick: seconds after which a receive that waits looks again, besides at its end.
    """
    return ModelBroker(service, line, tick)


def _for_models(original: Callable[..., Any], model: Callable[..., Any]) -> Callable[..., Any]:
    """The function for our links, and the original one for all others."""

    @wraps(original)
    def chosen(link: Any, *args: Any, **options: Any) -> Any:
        call = model if isinstance(link, ModelLink) else original
        return call(link, *args, **options)

    return chosen


_PRIVATE: Final[dict[str, Callable[..., Any]]] = {
    "settle_many": ModelLink.settle,
    "renew_many": ModelLink.renew,
    "pull": lambda link, limit, wait, stop=None: link.pull(limit, wait),
    "open_link": ModelLink.open,
    "end": ModelLink.end,
    "close": ModelLink.end,
    "disconnect": ModelLink.end,
    "has_unread": lambda link: False,
    "forget": lambda link, deliveries: None,
    "release": ModelLink.release,
    "peek_over": lambda sender, receiver, start, limit, timeout: receiver.peek_messages(
        limit, start, timeout
    ),
}


def _post_inline(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Control._post`, which for our client carries out the work at once."""

    @wraps(original)
    def post(control: Any, work: Any) -> Any:
        if not isinstance(control._client, ModelBus):
            return original(control, work)
        if control._closed:
            raise BrokerUnavailable("the connection was closed; make another receiver")
        control._do([work])
        return work.future

    return post


def _close_inline(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Control.close`, which for our client closes the connection at once."""

    @wraps(original)
    def close(control: Any) -> None:
        original(control)
        receiver = control._receiver
        if isinstance(control._client, ModelBus) and receiver is not None:
            control._client.close(receiver)

    return close


def _install() -> None:
    for name, model in _PRIVATE.items():
        setattr(private, name, _for_models(getattr(private, name), model))
    replaced: Any = Control
    replaced._post = _post_inline(Control._post)
    replaced.close = _close_inline(Control.close)


_install()
