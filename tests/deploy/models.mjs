// Prints the models of Microsoft's management SDKs as JSON: {package: {models, discriminators, versions}}.
// They are generated from the descriptions that the services publish, with the names as they are on the wire.
import { existsSync, readFileSync } from "node:fs";

const found = {};
for (const name of process.argv.slice(2)) {
  const folders = ["dist-esm/src/models", "dist/esm/models"].map(
    (each) => new URL(`./node_modules/@azure/${name}/${each}/`, import.meta.url),
  );
  const folder = folders.find((each) => existsSync(new URL("mappers.js", each)));
  const { discriminators, ...models } = await import(new URL("mappers.js", folder));
  // read, and not imported: its own imports have no extensions, which Node.js wants
  const parameters = readFileSync(new URL("parameters.js", folder), "utf8");
  const version = /export const (apiVersion\d*) = \{[^;]*?defaultValue: "([^"]+)"/g;
  const versions = Object.fromEntries(
    [...parameters.matchAll(version)].map((each) => [each[1], each[2]]),
  );
  found[name] = { models, discriminators: discriminators ?? {}, versions };
}
console.log(JSON.stringify(found));
