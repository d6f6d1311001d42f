// Helpers to build the page's elements. Text is only ever set as text: nothing here parses HTML.

const PROPERTIES = new Set(["value", "checked", "disabled", "textContent", "hidden", "open", "inert"]);
const SVG = "http://www.w3.org/2000/svg";

/** Return a new element; `attributes` may hold listeners ("onclick") and a few properties. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return the element of the page that has this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element #${id}`);
  return found;
}

// Outlines on a grid of 24 x 24.
const ICONS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  panel: "M4 5h16v14H4zM15 5v14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM14 6l4 4",
  redo: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  export: "M12 4v11M7 10l5 5 5-5M5 20h14",
  import: "M12 15V4M7 9l5-5 5 5M5 20h14",
  search: "M11 4a7 7 0 1 0 0 14a7 7 0 0 0 0-14zM16 16l4 4",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8 8 0 0 1 9.5 4a8 8 0 1 0 10.5 10.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  keys: "M3 7h18v10H3zM7 11h0M11 11h0M15 11h0M8 14h8",
  thought: "M9 18h6M10 21h4M12 3a6 6 0 0 0-3.5 10.9c.6.5 1 1.2 1 2.1h5c0-.9.4-1.6 1-2.1A6 6 0 0 0 12 3z",
  tool: "M14.5 6.5a4 4 0 0 0 5 5L11 20a2.1 2.1 0 0 1-3-3l8.500-8.500M14.500 6.500a4 4 0 0 1 3-3l-1 3 2 2 3-1",
  more: "M5 12h0M12 12h0M19 12h0",
  play: "M8 5l11 7-11 7z",
  attach: "M20 11l-8.500 8.500a5 5 0 0 1-7-7L13 4a3.400 3.400 0 0 1 4.800 4.800l-8.300 8.300a1.700 1.700 0 0 1-2.400-2.400L14.500 7",
};

/** Return an outline that screen readers skip. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  picture.setAttribute("viewBox", "0 0 24 24");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  picture.setAttribute("focusable", "false");
  path.setAttribute("d", ICONS[name]);
  picture.append(path);
  return picture;
}

/** Put the icon that `data-icon` names before the content of each such element. */
export function drawIcons(root = document) {
  for (const node of root.querySelectorAll("[data-icon]")) {
    node.prepend(icon(node.dataset.icon));
    node.removeAttribute("data-icon");
  }
}

export const TOUCH = matchMedia("(pointer: coarse)"); // a phone, whose keyboard has no Shift+Enter

/** Return whether a key sends what was written: Enter or, where that has to begin a line, Ctrl+Enter. */
export function sendsMessage(event) {
  if (event.key !== "Enter" || event.isComposing) return false;
  return TOUCH.matches ? event.ctrlKey || event.metaKey : !event.shiftKey;
}

/** Return a button with an icon and a name, which is shown as a tooltip. */
export function iconButton(name, label, onclick, more = {}) {
  const classes = `icon-button ${more.class ?? ""}`.trim();
  return el("button", { type: "button", ...more, class: classes, "aria-label": label, title: label, onclick }, icon(name));
}

/** Copy text; also where the page has no secure context, such as over plain HTTP in a home network. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Refused by the browser: the older way may still work.
    }
  }
  const before = document.activeElement;
  const field = el("textarea", { value: text, class: "visually-hidden", "aria-hidden": "true", tabindex: "-1" });
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (before instanceof HTMLElement) before.focus();
  return copied;
}

/** Return a button that copies what `text()` returns, and shows that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const copied = await copyText(text());
    announce(copied ? "Copied." : "The browser refused to copy.");
    if (!copied) return;
    button.replaceChildren(icon("check"));
    button.classList.add("done");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.classList.remove("done");
    }, 1500);
  });
  return button;
}

/** Let screen readers say a short text. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  // A text that is set again would not be read; readers notice changes after a moment.
  setTimeout(() => (region.textContent = text), 50);
}

let toastTimer = 0;

/** Show a short text at the edge of the page for some seconds; screen readers say it, too. */
export function toast(text) {
  const box = byId("toast");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), 6000);
}

/** Offer text as a file to save. */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return an id that no other object has; `crypto.randomUUID` needs a secure context. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
