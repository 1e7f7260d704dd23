// Lets a benchmark fill a table at once. Loaded before Azurite's table service with `node --require`.
//
// `POST /ACCOUNT/TABLE?file=FILE` to the port that is printed at the start keeps the rows of a file,
// a line of JSON each, as if each had come in a request of its own to insert it: Azurite's functions
// make of them what it keeps. Its index is built once, where a request takes 1 ms and more.
//
// Azurite tries the filter of a query on each row of the table, 2 µs a row and more, and sorts what
// it finds; the service has an index. Here a query looks at the partitions that it names, one after
// the other, until it has a page.
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

// {"$between": [least, most]} of the partitions that a filter names; undefined for all of them.
function partitions(filter) {
  const texts = [];
  let left = (filter || "").replace(/'((?:[^']|'')*)'/g, (_, text) => `#${texts.push(text) - 1}`);
  for (let before; before !== left; ) [before, left] = [left, left.replace(/\([^()]*\)/g, "")];
  if (/\b(or|not)\b/.test(left)) return undefined;
  const least = [];
  const most = [];
  for (const [, word, place] of left.matchAll(/\bPartitionKey (eq|ge|gt|le|lt) #(\d+)/g)) {
    const key = texts[place].replaceAll("''", "'");
    if (!word.startsWith("l")) least.push(key);
    if (!word.startsWith("g")) most.push(key);
  }
  if (!least.length || !most.length) return undefined;
  return { PartitionKey: { $between: [least.sort().pop(), most.sort()[0]] } };
}

// What Azurite does with the chain of a query. rows: in the order of their partitions.
function chained(rows) {
  const filters = [];
  let most = Infinity;
  const chain = {
    where: (filter) => (filters.push(filter), chain),
    sort: () => chain,
    limit: (count) => ((most = count), chain),
    data: () => {
      const found = [];
      let partition = [];
      const close = () => {
        partition.sort((one, other) => (one.RowKey < other.RowKey ? -1 : 1));
        found.push(...partition);
        partition = [];
      };
      for (const row of rows) {
        if (partition.length && partition[0].PartitionKey !== row.PartitionKey) {
          close();
          if (found.length >= most) break;
        }
        if (filters.every((filter) => filter(row))) partition.push(row);
      }
      close();
      return found.slice(0, most);
    },
  };
  return chain;
}

const query = Store.prototype.queryTableEntities;
Store.prototype.queryTableEntities = function (context, account, table, options, ...next) {
  const narrow = partitions(options.filter);
  const narrowed = Object.create(this);
  narrowed.getEntityCollection = (...given) => {
    const collection = this.getEntityCollection(...given);
    const found = () => chained(collection.chain().find(narrow).data());
    return { chain: () => (narrow ? found() : collection.chain()) };
  };
  return query.call(narrowed, context, account, table, options, ...next);
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
