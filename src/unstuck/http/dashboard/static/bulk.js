// Choose many jobs at once.
export function startBulk() {
  const form = document.getElementById("bulk");
  const all = document.getElementById("all");
  if (!form || !all) return;
  const boxes = [...form.querySelectorAll("input[name=job]")];
  const verbs = [...form.querySelectorAll("button[data-bulk]")];
  const said = document.getElementById("chosen");
  all.hidden = false;

  const show = () => {
    const number = boxes.filter((box) => box.checked).length;
    all.checked = number === boxes.length;
    all.indeterminate = number > 0 && number < boxes.length;
    said.textContent = number ? `${number} of ${boxes.length} chosen` : "Choose jobs to retry or cancel them";
    for (const verb of verbs) verb.disabled = number === 0;
  };
  all.addEventListener("change", () => {
    for (const box of boxes) box.checked = all.checked;
    show();
  });
  form.addEventListener("change", show);
  addEventListener("pageshow", show);
  show();
}
