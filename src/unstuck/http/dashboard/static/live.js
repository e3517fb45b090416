// Listen to what changes, put it in place, and say so when the line is cut.
import { setClock } from "./clocks.js";
import { morph } from "./morph.js";

const LOST_AFTER_MS = 6000;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function startLive(tick) {
  const address = document.body.dataset.live;
  if (!address || !window.EventSource) return;
  const line = document.getElementById("connection");
  let heardAt = Date.now();
  let source;

  const show = (state, said) => {
    const text = line.querySelector(".link-text");
    // Only what is new is read out.
    if (text.textContent !== said) text.textContent = said;
    line.dataset.state = state;
    document.body.classList.toggle("stale", state === "lost");
  };
  const lost = () => show("lost", `Connection lost, since ${clock(heardAt)}`);

  const hear = (event) => {
    heardAt = Date.now();
    const { now, blind_since: blind, fragments } = JSON.parse(event.data);
    setClock(now);
    if (blind === null) show("on", "Live");
    else show("lost", `No answer from the ledger, since ${clock(blind * 1000)}`);
    for (const [id, html] of Object.entries(fragments)) swap(id, html);
    if (Object.keys(fragments).length) tick();
  };

  const open = () => {
    source?.close();
    source = new EventSource(address);
    source.onmessage = hear;
    // The browser tries again by itself, but gives up on an answer that is no stream: then we do it.
    source.onerror = () => {
      if (Date.now() - heardAt > 1500) lost();
    };
  };

  setInterval(() => {
    if (Date.now() - heardAt < LOST_AFTER_MS) return;
    lost();
    if (source.readyState === EventSource.CLOSED) open();
  }, 1000);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => event.persisted && open());
  open();
}

const clock = (ms) => new Date(ms).toLocaleTimeString();
const put_off = new Map();

function swap(id, html) {
  const target = document.getElementById(id);
  if (!target) return;
  // Text that somebody is marking, to copy it, must hold still.
  const selection = getSelection();
  if (selection && !selection.isCollapsed && target.contains(selection.anchorNode)) {
    put_off.set(id, html);
    return;
  }
  put_off.delete(id);
  for (const beating of morph(target, html)) pulse(beating);
}

document.addEventListener("selectionchange", () => {
  if (getSelection()?.isCollapsed) for (const [id, html] of [...put_off]) swap(id, html);
});

function pulse(element) {
  if (calm.matches) return;
  element.animate(
    [
      { transform: "scale(1)", opacity: 1 },
      { transform: "scale(1.45)", opacity: 1, offset: 0.2 },
      { transform: "scale(0.94)", opacity: 0.85, offset: 0.45 },
      { transform: "scale(1)", opacity: 1 },
    ],
    { duration: 700, easing: "ease-out" },
  );
}
