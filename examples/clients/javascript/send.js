// Sends a task to an aztask worker, over Service Bus or a Storage queue.
//
//   node send.js CONNECTION_STRING QUEUE TASK ['[1, 2]'] ['{"name": "x"}'] [TASK_ID]
const { randomUUID } = require("node:crypto");

// As in docs/static/task-message.schema.json.
function taskMessage(task, args = [], kwargs = {}, id = randomUUID()) {
  return {
    body: [args, kwargs, {}],
    contentType: "application/json",
    messageId: `${id}:0:0`,
    subject: task,
    headers: { task, id },
  };
}

async function sendToServiceBus(connection, queue, message) {
  const { ServiceBusClient } = require("@azure/service-bus");
  const client = new ServiceBusClient(connection);
  const { headers, body, ...properties } = message;
  try {
    await client.createSender(queue).sendMessages({
      ...properties,
      body: Buffer.from(JSON.stringify(body)),  // bytes: an object would be written once more
      applicationProperties: headers,
    });
  } finally {
    await client.close();
  }
}

async function sendToStorageQueue(connection, queue, message) {
  const { QueueClient } = require("@azure/storage-queue");
  const { encode } = require("@msgpack/msgpack");
  const text = Buffer.from(encode({
    v: 1,
    headers: message.headers,
    properties: {
      message_id: message.messageId,
      content_type: message.contentType,
      subject: message.subject,
    },
    body: Buffer.from(JSON.stringify(message.body)),
  })).toString("base64");
  // -1: it is kept until a worker deletes it. The service's own default is seven days.
  await new QueueClient(connection, queue).sendMessage(text, { messageTimeToLive: -1 });
}

async function main() {
  const [connection, queue, task, args = "[]", kwargs = "{}", id] = process.argv.slice(2);
  if (task === undefined) {
    console.error("usage: node send.js CONNECTION_STRING QUEUE TASK [ARGS] [KWARGS] [TASK_ID]");
    process.exit(2);
  }
  const message = taskMessage(task, JSON.parse(args), JSON.parse(kwargs), id);
  const bus = connection.toLowerCase().includes("endpoint=sb://");
  await (bus ? sendToServiceBus : sendToStorageQueue)(connection, queue, message);
  console.log(message.headers.id);
}

module.exports = { taskMessage, sendToServiceBus, sendToStorageQueue };
if (require.main === module) main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
