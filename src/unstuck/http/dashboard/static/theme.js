// Before the first paint: a theme that was chosen must not flash in after the other.
"use strict";
try {
  const chosen = localStorage.getItem("unstuck-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage: the system's choice it is.
}
