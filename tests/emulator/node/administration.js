// Every method of the JavaScript SDK's administration client; prints what it read as JSON.
// The client speaks TLS only: run with NODE_EXTRA_CA_CERTS.
"use strict";

const assert = require("assert");
const { ServiceBusAdministrationClient } = require("@azure/service-bus");

async function all(pages) {
  const found = [];
  for await (const each of pages) found.push(each);
  return found;
}

const names = (entities, key = "name") => entities.map((each) => each[key]).sort();
const missing = (error) => error.code === "MessageEntityNotFoundError" || error.statusCode === 404;

async function queues(admin) {
  await admin.createQueue("one", { lockDuration: "PT30S", maxDeliveryCount: 2147483647,
    requiresDuplicateDetection: true, duplicateDetectionHistoryTimeWindow: "PT1M",
    defaultMessageTimeToLive: "P1D", deadLetteringOnMessageExpiration: true,
    autoDeleteOnIdle: "PT10M", userMetadata: "mine" });
  await admin.createQueue("two", { requiresSession: true });
  const one = await admin.getQueue("one");
  one.lockDuration = "PT45S";
  await admin.updateQueue(one);
  const kept = await admin.getQueue("one");
  assert.deepStrictEqual(names(await all(admin.listQueues())), ["one", "two"]);
  assert.deepStrictEqual(names(await all(admin.listQueuesRuntimeProperties())), ["one", "two"]);
  assert.strictEqual((await admin.getQueueRuntimeProperties("two")).totalMessageCount, 0);
  assert(await admin.queueExists("two"));
  await admin.deleteQueue("two");
  assert(!(await admin.queueExists("two")));
  await assert.rejects(() => admin.getQueue("two"), missing);
  const { lockDuration, maxDeliveryCount, autoDeleteOnIdle, defaultMessageTimeToLive } = kept;
  return { lockDuration, maxDeliveryCount, autoDeleteOnIdle, defaultMessageTimeToLive };
}

async function topics(admin) {
  await admin.createTopic("typed", { defaultMessageTimeToLive: "PT1H" });
  await admin.createTopic("gone");
  const typed = await admin.getTopic("typed");
  typed.userMetadata = "mine";
  await admin.updateTopic(typed);
  assert.deepStrictEqual(names(await all(admin.listTopics())), ["gone", "typed"]);
  assert.deepStrictEqual(names(await all(admin.listTopicsRuntimeProperties())), ["gone", "typed"]);
  await admin.deleteTopic("gone");
  assert(!(await admin.topicExists("gone")) && (await admin.topicExists("typed")));
  await admin.createSubscription("typed", "one", { maxDeliveryCount: 3 });
  await admin.createSubscription("typed", "two", {
    defaultRuleOptions: { name: "first", filter: { sqlExpression: "1=0" } } });
  const one = await admin.getSubscription("typed", "one");
  one.maxDeliveryCount = 4;
  await admin.updateSubscription(one);
  const listed = await all(admin.listSubscriptions("typed"));
  assert.deepStrictEqual(names(listed, "subscriptionName"), ["one", "two"]);
  const runtime = await all(admin.listSubscriptionsRuntimeProperties("typed"));
  assert.strictEqual(runtime.length, 2);
  assert.strictEqual((await admin.getTopicRuntimeProperties("typed")).subscriptionCount, 2);
  await admin.getSubscriptionRuntimeProperties("typed", "one");
  assert.deepStrictEqual(names(await all(admin.listRules("typed", "two"))), ["first"]);
  await admin.deleteSubscription("typed", "two");
  assert(!(await admin.subscriptionExists("typed", "two")));
  return (await admin.getSubscription("typed", "one")).maxDeliveryCount;
}

async function rules(admin) {
  const applicationProperties = { number: 5, text: "x", flag: true, moment: new Date(0) };
  await admin.createRule("typed", "one", "correlated", { applicationProperties });
  const sqlParameters = { "@p": 7 };
  await admin.createRule("typed", "one", "sql", { sqlExpression: "a = @p", sqlParameters },
    { sqlExpression: "SET a = 1" });
  const sql = await admin.getRule("typed", "one", "sql");
  sql.action = { sqlExpression: "SET a = @q", sqlParameters: { "@q": 2 } };
  await admin.updateRule("typed", "one", sql);
  const found = {};
  for (const rule of await all(admin.listRules("typed", "one"))) found[rule.name] = rule;
  await admin.deleteRule("typed", "one", "correlated");
  assert(!(await admin.ruleExists("typed", "one", "correlated")));
  await assert.rejects(() => admin.createRule("typed", "one", "bad", { sqlExpression: "a = = b" }));
  return found;
}

async function main() {
  const admin = new ServiceBusAdministrationClient(process.argv[2]);
  const { name, messagingSku } = await admin.getNamespaceProperties();
  const found = { namespace: [name, messagingSku], queue: await queues(admin),
    deliveries: await topics(admin), rules: await rules(admin) };
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
