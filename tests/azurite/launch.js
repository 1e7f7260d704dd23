// Starts one of Azurite's services from the one file into which esbuild has put it with all that it
// needs, and with the code that V8 compiled for that file before: a third of the processor time.
//
//     node launch.js FILE ARGUMENTS        starts it
//     node launch.js --compile FILE        starts it on some port, keeps the compiled code, ends
//
// Compiled code of another version of Node.js is passed over by V8.
"use strict";
const fs = require("fs");
const Module = require("module");
const os = require("os");
const path = require("path");
const vm = require("vm");

const compile = process.argv[2] === "--compile";
const file = path.resolve(process.argv[compile ? 3 : 2]);
const service = path.basename(file, ".js");
const data = compile ? fs.mkdtempSync(path.join(os.tmpdir(), "azurite-")) : "";
process.argv.splice(1, compile ? 3 : 2, file);
if (compile) {
  process.argv.push(`--${service}Port`, "0", "--location", data, "--disableTelemetry");
}

let cachedData;
try {
  cachedData = compile ? undefined : fs.readFileSync(`${file}.compiled`);
} catch {
  // It then starts more slowly.
}
const source = fs.readFileSync(file, "utf8").replace(/^#![^\n]*/, "");
const script = new vm.Script(Module.wrap(source), { filename: file, cachedData });

if (compile) {
  const log = console.log;
  console.log = (...words) => {
    log(...words);
    if (!String(words[0]).includes("successfully")) return;
    fs.writeFileSync(`${file}.compiled.new`, script.createCachedData());
    fs.renameSync(`${file}.compiled.new`, `${file}.compiled`);
    fs.rmSync(data, { recursive: true, force: true });
    process.exit(0);
  };
}

const main = new Module(file, null);
main.filename = file;
main.paths = Module._nodeModulePaths(path.dirname(file));
process.mainModule = main;
const folder = path.dirname(file);
const require_ = Module.createRequire(file);
require_.main = main;
script.runInThisContext().call(main.exports, main.exports, require_, main, file, folder);
