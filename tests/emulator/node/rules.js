// Rules with typed properties and parameters: created, and listed as they were created.
// The SDK's administration client speaks TLS only: run with NODE_EXTRA_CA_CERTS.
"use strict";

const { ServiceBusAdministrationClient } = require("@azure/service-bus");

async function main() {
  const admin = new ServiceBusAdministrationClient(process.argv[2]);
  await admin.createTopic("typed");
  await admin.createSubscription("typed", "one");
  const applicationProperties = { number: 5, text: "x", flag: true, moment: new Date(0) };
  await admin.createRule("typed", "one", "correlated", { applicationProperties });
  const sqlParameters = { "@p": 7 };
  await admin.createRule("typed", "one", "sql", { sqlExpression: "a = @p", sqlParameters });
  const found = {};
  for await (const rule of admin.listRules("typed", "one")) found[rule.name] = rule.filter;
  console.log(JSON.stringify(found));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
