// Ask before what destroys. Without this the server asks, on a screen of its own.
export function startAsking() {
  const dialog = document.getElementById("confirm");
  let asked = null;

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-ask]");
    if (!button || button.disabled) return;
    event.preventDefault();
    asked = button;
    const [title, ...rest] = button.dataset.ask.split("? ");
    dialog.querySelector("#confirm-title").textContent = `${title.replace(/\?$/, "")}?`;
    dialog.querySelector("#confirm-text").textContent = rest.join("? ");
    dialog.querySelector("[data-answer=yes]").textContent = button.dataset.button || "Do it";
    dialog.showModal();
    dialog.querySelector("[data-answer=no]").focus();
  });

  dialog.addEventListener("click", (event) => {
    const answer = event.target.dataset?.answer;
    if (!answer) return;
    dialog.close();
    if (answer === "yes" && asked) submit(asked);
    else document.getElementById(asked?.id)?.focus();
  });
}

function submit(button) {
  // The button may have been replaced by a live change since: what it said is sent from a form of our own.
  const owner = button.form ?? document.getElementById("verbs");
  const form = owner.cloneNode(false);
  form.removeAttribute("id");
  form.hidden = true;
  form.action = button.getAttribute("formaction") ?? owner.action;
  for (const [name, value] of new FormData(owner)) field(form, name, value);
  if (button.name) field(form, button.name, button.value);
  field(form, "confirmed", "yes");
  document.body.append(form);
  form.submit();
}

function field(form, name, value) {
  const input = document.createElement("input");
  input.type = "hidden";
  input.name = name;
  input.value = value;
  form.append(input);
}
