// AMQP over WebSockets with the JavaScript SDK: one message sent, received and completed.
// The SDK speaks TLS here in every mode: run with NODE_EXTRA_CA_CERTS.
"use strict";

const { ServiceBusClient } = require("@azure/service-bus");
const webSocket = require("ws");

async function main() {
  const client = new ServiceBusClient(process.argv[2], {
    webSocketOptions: { webSocket },
    retryOptions: { maxRetries: 0 },
  });
  const body = "x".repeat(200000);
  await client.createSender("q").sendMessages({ body });
  const receiver = client.createReceiver("q");
  const [message] = await receiver.receiveMessages(1, { maxWaitTimeInMs: 5000 });
  await receiver.completeMessage(message);
  await client.close();
  console.log(JSON.stringify(message.body.length));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
