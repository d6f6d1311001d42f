// Sets the colours before the first paint; a plain script, since modules run after it.

(() => {
  const KEY = "headroom.theme";
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(KEY);
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  }

  function show(theme) {
    if (theme === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
  }

  window.headroomTheme = {
    get: stored,
    next() {
      const theme = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // It holds for this page alone.
      }
      show(theme);
      return theme;
    },
  };
  show(stored());
})();
