// Reads the page again when the server says so. Without this file every page is whole, and still.
"use strict";
(() => {
  const button = document.getElementById("live-button");
  const state = document.getElementById("live-state");
  if (!button || !window.EventSource) return;
  let on = true;
  let source = null;
  const say = text => { state.textContent = text; };
  // A reader who is inside the part that is replaced keeps the place: it waits.
  const busy = () => document.hidden ||
    document.getElementById("live")?.contains(document.activeElement) ||
    String(getSelection()) !== "";
  const open = () => {
    source = new EventSource("/live");
    source.addEventListener("figures", () => {
      if (!busy()) document.body.dispatchEvent(new Event("figures"));
    });
    source.onopen = () => say("Live");
    source.onerror = () => say("Not connected");
  };
  // On a phone the menu scrolls sideways.
  const here = document.querySelector("nav [aria-current]");
  if (here) here.closest("ul").scrollLeft = here.offsetLeft - 40;
  button.hidden = false;
  button.addEventListener("click", () => {
    on = !on;
    button.textContent = on ? "Pause" : "Go on";
    if (on) open(); else { source.close(); say("Paused"); }
  });
  addEventListener("pagehide", () => source?.close());
  open();
})();
