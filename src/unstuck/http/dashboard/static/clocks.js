// Keep "12s ago" true. Times are the server's: its clock is told with every message.
let offset = Number(document.body.dataset.now) * 1000 - Date.now();

export function setClock(serverSeconds) {
  offset = serverSeconds * 1000 - Date.now();
}

export function startClocks() {
  tick();
  setInterval(tick, 1000);
}

export function tick() {
  const now = (Date.now() + offset) / 1000;
  for (const element of document.querySelectorAll("time[data-ago], time[data-since]")) {
    const since = element.dataset.since;
    const text = since !== undefined ? coarse(Math.max(0, now - Number(since))) : ago(now - Number(element.dataset.ago));
    if (element.textContent !== text) element.textContent = text;
  }
}

function ago(age) {
  if (age < -1) return `in ${coarse(-age)}`;
  return age < 1 ? "just now" : `${coarse(age)} ago`;
}

function coarse(seconds) {
  if (seconds < 60) return `${Math.round(seconds)}s`;
  const whole = seconds < 600 ? Math.round(seconds) : Math.round(seconds / 60) * 60;
  const parts = [];
  let left = whole;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    const amount = Math.floor(left / size);
    left -= amount * size;
    if (amount) parts.push(`${amount}${unit}`);
  }
  return parts.slice(0, 2).join("");
}
