// What the SDK takes from Node: esbuild puts these in wherever its code names them.
export { Buffer } from "buffer";
export { default as process } from "process";
