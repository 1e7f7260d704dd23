// Lets a benchmark fill a table at once. Loaded before Azurite's table service with `node --require`.
//
// `POST /ACCOUNT/TABLE?file=FILE` to the port that is printed at the start keeps the rows of a file,
// a line of JSON each, as if each had come in a request of its own to insert it: Azurite's functions
// make of them what it keeps. Its index is built once, where a request takes 1 ms and more.
"use strict";
const fs = require("fs");
const http = require("http");
const path = require("path");
const readline = require("readline");

const sources = path.join(__dirname, "node_modules", "azurite", "dist", "src", "table");
const Store = require(`${sources}/persistence/LokiTableMetadataStore.js`).default;
const TableHandler = require(`${sources}/handlers/TableHandler.js`).default;
const { NormalizedEntity } = require(`${sources}/entity/NormalizedEntity.js`);

let store;
const init = Store.prototype.init;
Store.prototype.init = function () {
  store = this;
  return init.call(this);
};

function kept(tableEntityProperties, startTime) {
  const { PartitionKey, RowKey } = tableEntityProperties;
  const options = { tableEntityProperties };
  const made = TableHandler.prototype.createPersistedEntity;
  const entity = made({ startTime }, options, PartitionKey, RowKey);
  new NormalizedEntity(entity).normalize();
  entity.properties.Timestamp = entity.lastModifiedTime;
  entity.properties["Timestamp@odata.type"] = "Edm.DateTime";
  return entity;
}

async function fill(url) {
  const [account, table] = url.pathname.slice(1).split("/");
  const lines = readline.createInterface({ input: fs.createReadStream(url.searchParams.get("file")) });
  const rows = [];
  for await (const line of lines) rows.push(kept(JSON.parse(line), new Date()));
  store.getEntityCollection(account, table, {}).insert(rows, true);
  return rows.length;
}

const server = http.createServer((request, response) => {
  fill(new URL(request.url, "http://127.0.0.1")).then(
    (count) => response.end(String(count)),
    (error) => {
      response.statusCode = 500;
      response.end(String(error));
    },
  );
});
server.listen(0, "127.0.0.1", () => console.log(`fill on ${server.address().port}`));
server.unref();
