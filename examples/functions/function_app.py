"""Functions beside aztask: two that send to its queues, and two that read what it has sent.

It needs the packages azure-functions and msgpack, and not aztask.
"""

import json
import logging
import uuid
from typing import Any

import azure.functions as func
import msgpack

app = func.FunctionApp()
CONNECTION = "AzureWebJobsStorage"
BUS = "ServiceBusConnection"


@app.function_name("order")
@app.route("orders", methods=["POST"])
@app.queue_output(arg_name="message", queue_name="orders", connection=CONNECTION)
def order(req: func.HttpRequest, message: func.Out[str]) -> func.HttpResponse:
    """Plain JSON for a handler. The host writes it as base64, or as text: see host.json."""
    message.set(json.dumps(req.get_json()))
    return func.HttpResponse(status_code=202)


@app.function_name("picture")
@app.route("pictures", methods=["POST"])
@app.queue_output(arg_name="message", queue_name="pictures", connection=CONNECTION)
def picture(req: func.HttpRequest, message: func.Out[bytes]) -> func.HttpResponse:
    """A task of aztask. The host writes bytes as base64, which is what aztask reads."""
    task_id = str(uuid.uuid4())
    message.set(task_message("pictures.resize", task_id, req.get_json()["name"], width=200))
    return func.HttpResponse(task_id, status_code=202)


@app.function_name("queued")
@app.queue_trigger(
    arg_name="message",
    queue_name="for-functions",
    connection=CONNECTION,
    data_type=func.DataType.BINARY,
)
def queued(message: func.QueueMessage) -> None:
    """A message that aztask has put into a Storage queue."""
    name, task_id, args, kwargs = read_task(message.get_body())
    logging.info("task %s, id %s: %s %s", name, task_id, args, kwargs)


@app.function_name("bussed")
@app.service_bus_queue_trigger(
    arg_name="message",
    queue_name="for-functions",
    connection=BUS,
    data_type=func.DataType.BINARY,
)
def bussed(message: func.ServiceBusMessage) -> None:
    """A message that aztask has put into a Service Bus queue: the headers are its properties."""
    headers = message.application_properties
    args, kwargs, _ = arguments(message.get_body(), message.content_type)
    logging.info("task %s, id %s: %s %s", headers["task"], headers["id"], args, kwargs)


def task_message(task: str, task_id: str, *args: Any, **kwargs: Any) -> bytes:
    """The bytes of a message for a Storage queue; docs/wire.md has all that may be in it."""
    properties = {"message_id": f"{task_id}:0:0", "content_type": "application/json"}
    body = json.dumps([args, kwargs, {}]).encode()
    headers = {"task": task, "id": task_id}
    return msgpack.packb({"v": 1, "headers": headers, "properties": properties, "body": body})


def read_task(data: bytes) -> tuple[str, str, list[Any], dict[str, Any]]:
    """(name, id, args, kwargs) of a message in a Storage queue."""
    whole = msgpack.unpackb(data)
    kind = whole["properties"].get("content_type", "application/x-msgpack")
    args, kwargs, _ = arguments(whole["body"], kind)
    return whole["headers"]["task"], whole["headers"]["id"], args, kwargs


def arguments(body: bytes, content_type: str | None) -> list[Any]:
    """The list of a body: positional arguments, named ones, and an empty map."""
    found = json.loads(body) if content_type == "application/json" else msgpack.unpackb(body)
    return list(found)
