// Change a piece of the page into a new one and touch only what differs: focus, selection, opened details,
// scroll positions and animations of all that stayed the same are kept.

const OF_THE_READER = { DETAILS: ["open"], DIALOG: ["open"], INPUT: ["checked", "value"] };

export function morph(target, html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  const beats = [];
  children(target, template.content, beats);
  return beats;
}

function children(before, after, beats) {
  const keyed = new Map();
  for (const child of before.children) if (key(child)) keyed.set(key(child), child);
  let at = before.firstChild;
  for (const fresh of [...after.childNodes]) {
    const known = key(fresh) && keyed.get(key(fresh));
    if (known) keyed.delete(key(fresh));
    const same = known || (at && !key(at) && alike(at, fresh) && !key(fresh) ? at : null);
    if (!same) {
      before.insertBefore(fresh, at);
      collect(fresh, beats);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else before.insertBefore(same, at);
    node(same, fresh, beats);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function node(before, after, beats) {
  if (before.nodeType !== Node.ELEMENT_NODE) {
    if (before.nodeValue !== after.nodeValue) before.nodeValue = after.nodeValue;
    return;
  }
  const beat = before.dataset.beat;
  attributes(before, after);
  if (beat !== before.dataset.beat) beats.push(before);
  // Clocks write themselves.
  if (before.tagName === "TIME") return;
  children(before, after, beats);
}

function attributes(before, after) {
  const kept = OF_THE_READER[before.tagName] || [];
  for (const { name, value } of [...after.attributes]) {
    if (!kept.includes(name) && before.getAttribute(name) !== value) before.setAttribute(name, value);
  }
  for (const { name } of [...before.attributes]) {
    if (!after.hasAttribute(name) && !kept.includes(name)) before.removeAttribute(name);
  }
}

function key(one) {
  return one.nodeType === Node.ELEMENT_NODE ? one.id || one.dataset.key : undefined;
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName;
}

function collect(fresh, beats) {
  if (fresh.nodeType !== Node.ELEMENT_NODE) return;
  if (fresh.dataset.beat) beats.push(fresh);
  beats.push(...fresh.querySelectorAll("[data-beat]"));
}
