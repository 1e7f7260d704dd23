// Lets a test move the emulator's clock. Loaded before Azurite with `node --require`.
//
// Date is replaced by one that is AZTASK_CLOCK_OFFSET seconds ahead; a request to the port that is
// printed at the start (`POST /SECONDS`) moves it further. Timers keep running on the real clock.
"use strict";
const http = require("http");
const RealDate = Date;
let ahead = Number(process.env.AZTASK_CLOCK_OFFSET || 0) * 1000;

class MovedDate extends RealDate {
  constructor(...parts) {
    if (parts.length === 0) super(RealDate.now() + ahead);
    else super(...parts);
  }
  static now() {
    return RealDate.now() + ahead;
  }
}
global.Date = MovedDate;

const server = http.createServer((request, response) => {
  ahead += Number(request.url.slice(1)) * 1000;
  response.end(String(ahead / 1000));
});
server.listen(0, "127.0.0.1", () => console.log(`clock on ${server.address().port}`));
server.unref();
