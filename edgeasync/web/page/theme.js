// Runs before the first paint, so that a chosen theme does not flash. Without a choice, the system's applies.
"use strict";
(() => {
  const KEY = "edgeasync-theme";
  const root = document.documentElement;
  try {
    const chosen = localStorage.getItem(KEY);
    if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const isDark =
        getComputedStyle(root).colorScheme === "dark" ||
        (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
      root.dataset.theme = isDark ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // See above.
      }
      root.dispatchEvent(new Event("theme"));
    });
  });
})();
