// Everything that the JavaScript SDK does with a queue, a session and a subscription.
// Prints one JSON object; whatever is wrong is an exception and exit code 1.
"use strict";

const assert = require("assert");
const { ServiceBusClient, delay } = require("@azure/service-bus");

const [connectionString, queue, sessionQueue, topic] = process.argv.slice(2);
const wait = { maxWaitTimeInMs: 5000 };

async function take(receiver, count) {
  const got = [];
  while (got.length < count) {
    const more = await receiver.receiveMessages(count - got.length, wait);
    assert(more.length > 0, `only ${got.length} of ${count} messages came`);
    got.push(...more);
  }
  return got;
}

async function queueOperations(client) {
  const sender = client.createSender(queue);
  const receiver = client.createReceiver(queue);
  const dead = client.createReceiver(queue, { subQueueType: "deadLetter" });
  await sender.sendMessages({ body: { hello: "world" }, messageId: "m1", subject: "s",
    applicationProperties: { text: "t", number: 7, flag: true } });
  await sender.sendMessages([{ body: "a" }, { body: "b" }, { body: "c" }]);
  const batch = await sender.createMessageBatch();
  assert(batch.tryAddMessage({ body: "batched" }));
  await sender.sendMessages(batch);
  await sender.sendMessages({ body: Buffer.alloc(300000, 7) });

  const got = await take(receiver, 6);
  assert.deepStrictEqual(got[0].body, { hello: "world" });
  assert.deepStrictEqual(got[0].applicationProperties, { text: "t", number: 7, flag: true });
  assert.strictEqual(got[0].deliveryCount, 0);
  assert.strictEqual(got[5].body.length, 300000);
  await receiver.renewMessageLock(got[0]);
  await receiver.completeMessage(got[0]);
  await receiver.abandonMessage(got[1], { tried: 1 });
  await receiver.deferMessage(got[2]);
  await receiver.deadLetterMessage(got[3], { deadLetterReason: "r", deadLetterErrorDescription: "d", extra: "x" });
  await receiver.completeMessage(got[4]);
  await receiver.completeMessage(got[5]);

  const [again] = await take(receiver, 1);
  assert.strictEqual(again.body, "a");
  assert.strictEqual(again.deliveryCount, 1);
  assert.strictEqual(again.applicationProperties.tried, 1);
  await receiver.completeMessage(again);
  const [deferred] = await receiver.receiveDeferredMessages([got[2].sequenceNumber]);
  assert.strictEqual(deferred.body, "b");
  await receiver.completeMessage(deferred);
  const [letter] = await take(dead, 1);
  assert.strictEqual(letter.deadLetterReason, "r");
  assert.strictEqual(letter.deadLetterErrorDescription, "d");
  assert.strictEqual(letter.applicationProperties.extra, "x");
  await dead.completeMessage(letter);

  const later = new Date(Date.now() + 3600000);
  const numbers = await sender.scheduleMessages([{ body: "later" }, { body: "never" }], later);
  const peeked = await receiver.peekMessages(10);
  assert.deepStrictEqual(peeked.map((m) => m.state), ["scheduled", "scheduled"]);
  await sender.cancelScheduledMessages(numbers);
  assert.strictEqual((await receiver.peekMessages(10, { fromSequenceNumber: numbers[0] })).length, 0);
  await sender.scheduleMessages({ body: "soon" }, new Date(Date.now() + 500));
  const [soon] = await take(receiver, 1);
  await receiver.completeMessage(soon);

  const deleting = client.createReceiver(queue, { receiveMode: "receiveAndDelete" });
  await sender.sendMessages([{ body: 1 }, { body: 2 }]);
  assert.deepStrictEqual((await take(deleting, 2)).map((m) => m.body), [1, 2]);

  const seen = [];
  const subscription = deleting.subscribe({
    processMessage: async (message) => { seen.push(message.body); },
    processError: async (args) => { throw args.error; },
  });
  await sender.sendMessages([{ body: "x" }, { body: "y" }]);
  while (seen.length < 2) await delay(20);
  await subscription.close();
  await assert.rejects(() => client.createSender("nowhere").sendMessages({ body: 1 }),
    (error) => error.code === "MessagingEntityNotFound");
  return seen;
}

async function subscribing(client) {
  const sender = client.createSender(queue);
  const receiver = client.createReceiver(queue);
  const seen = [];
  const subscription = receiver.subscribe({
    processMessage: async (message) => { seen.push(message.body); },
    processError: async (args) => { throw args.error; },
  }, { maxConcurrentCalls: 5 });
  for (let n = 0; n < 20; n++) await sender.sendMessages({ body: n });
  while (seen.length < 20) await delay(20);
  await subscription.close();
  await delay(200);
  assert.strictEqual((await client.createReceiver(queue).peekMessages(5)).length, 0);
  return seen.length;
}

async function sessions(client) {
  const sender = client.createSender(sessionQueue);
  await sender.sendMessages([{ body: 1, sessionId: "s" }, { body: 2, sessionId: "s" }]);
  const receiver = await client.acceptNextSession(sessionQueue);
  assert.strictEqual(receiver.sessionId, "s");
  assert(receiver.sessionLockedUntilUtc > new Date());
  await receiver.setSessionState({ step: 1 });
  assert.deepStrictEqual(await receiver.getSessionState(), { step: 1 });
  await receiver.renewSessionLock();
  const got = await take(receiver, 2);
  assert.deepStrictEqual(got.map((m) => m.body), [1, 2]);
  for (const message of got) await receiver.completeMessage(message);
  await assert.rejects(() => client.acceptSession(sessionQueue, "s"),
    (error) => error.code === "SessionCannotBeLocked");
  await receiver.close();
  const other = await client.acceptSession(sessionQueue, "s");
  await other.close();
  return got.length;
}

async function subscriptions(client) {
  const rules = client.createRuleManager(topic, "one");
  await rules.createRule("big", { sqlExpression: "size > 10" });
  await rules.createRule("exact", { subject: "s", applicationProperties: { k: "v" } });
  await rules.deleteRule("$Default");
  const names = [];
  for await (const rule of rules.listRules()) names.push(rule.name);
  assert.deepStrictEqual(names.sort(), ["big", "exact"]);
  const sender = client.createSender(topic);
  await sender.sendMessages([
    { body: "big", applicationProperties: { size: 11 } },
    { body: "small", applicationProperties: { size: 5 } },
    { body: "exact", subject: "s", applicationProperties: { k: "v" } },
  ]);
  const receiver = client.createReceiver(topic, "one");
  const got = await take(receiver, 2);
  assert.deepStrictEqual(got.map((m) => m.body), ["big", "exact"]);
  for (const message of got) await receiver.completeMessage(message);
  return got.length;
}

async function main() {
  const client = new ServiceBusClient(connectionString, { retryOptions: { maxRetries: 0 } });
  const result = {};
  for (const part of [queueOperations, subscribing, sessions, subscriptions]) {
    result[part.name] = await part(client);
  }
  await client.close();
  console.log(JSON.stringify(result));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
