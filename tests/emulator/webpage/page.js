// AMQP over WebSockets in a page: the SDK takes the browser's own WebSocket.
import { ServiceBusClient } from "@azure/service-bus";

globalThis.run = async (connection) => {
  const client = new ServiceBusClient(connection, { retryOptions: { maxRetries: 0 } });
  const applicationProperties = { from: "page" };
  await client.createSender("q").sendMessages({ body: "x".repeat(200000), applicationProperties });
  const receiver = client.createReceiver("q");
  const [message] = await receiver.receiveMessages(1, { maxWaitTimeInMs: 10000 });
  await receiver.completeMessage(message);
  const left = await receiver.peekMessages(1, { fromSequenceNumber: message.sequenceNumber });
  await client.close();
  return [message.body.length, message.applicationProperties.from, left.length];
};
