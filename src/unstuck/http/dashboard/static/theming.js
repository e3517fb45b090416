// Choose light or dark; until somebody does, the system's choice holds.
const THEMES = ["system", "light", "dark"];

export function startTheme() {
  const button = document.getElementById("theme");
  button.hidden = false;
  const show = (theme) => {
    button.querySelector("span").textContent = `Theme: ${theme}`;
  };
  show(document.documentElement.dataset.theme ?? "system");
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("unstuck-theme", next);
    } catch {
      // No storage: it holds for this screen.
    }
    show(next);
  });
}
