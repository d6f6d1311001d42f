// The list of conversations: newest first, by day, with search, new names and deletion.

import { byId, el, iconButton } from "./dom.js";

const DAY = 24 * 3600 * 1000;
const SEARCH_WAIT = 150; // milliseconds after the last letter

/** Return the heading under which a conversation of a time stands. */
export function dayOf(time, now = Date.now()) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "Last 7 days";
  return time >= today - 30 * DAY ? "Last 30 days" : "Older";
}

/** The list; `actions` are open, rename and remove, each with an id. */
export class Sidebar {
  constructor(store, actions) {
    this.store = store;
    this.actions = actions;
    this.rows = [];
    this.current = null;
    this.running = new Set();
    this.found = null; // ids whose text matches the search; null: there is none
    this.box = byId("conversations");
    this.search = byId("search");
    let timer = 0;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.find(), SEARCH_WAIT);
    });
    this.box.addEventListener("keydown", (event) => this.move(event));
  }

  /** Read the list again and show it. */
  async refresh() {
    this.rows = (await this.store.list()).sort((a, b) => b.updated - a.updated);
    this.draw();
  }

  show(current, running) {
    this.current = current;
    this.running = running;
    this.draw();
  }

  async find() {
    const words = this.search.value.trim().toLowerCase();
    if (!words) this.found = null;
    else {
      const has = (text) => (text ?? "").toLowerCase().includes(words);
      this.found = await this.store.find(
        (conversation) => has(conversation.title) || Object.values(conversation.nodes).some((node) => has(node.content)),
      );
    }
    this.draw();
  }

  draw() {
    const rows = this.rows.filter((row) => this.found === null || this.found.has(row.id));
    const groups = new Map();
    for (const row of rows) {
      const day = dayOf(row.updated);
      if (!groups.has(day)) groups.set(day, []);
      groups.get(day).push(this.rowElement(row));
    }
    const focused = document.activeElement?.closest?.("[data-id]")?.dataset.id;
    const parts = [...groups].map(([day, items]) => el("section", {}, el("h2", {}, day), el("ul", {}, ...items)));
    if (!parts.length) parts.push(el("p", { class: "nothing" }, this.found ? "Nothing found." : "No conversations yet."));
    this.box.replaceChildren(...parts);
    if (focused) this.box.querySelector(`[data-id="${CSS.escape(focused)}"] .open`)?.focus();
  }

  rowElement({ id, title }) {
    const name = title || "New chat";
    const open = el("button", { type: "button", class: "open", title: name, "aria-current": id === this.current ? "page" : null, onclick: () => this.actions.open(id) }, name);
    open.addEventListener("dblclick", () => this.rename(id, name));
    return el(
      "li",
      { "data-id": id, class: this.running.has(id) ? "running" : null },
      open,
      el(
        "span",
        { class: "row-buttons" },
        iconButton("edit", `Rename ${name}`, () => this.rename(id, name)),
        iconButton("trash", `Delete ${name}`, () => this.actions.remove(id, name)),
      ),
    );
  }

  rename(id, name) {
    const row = this.box.querySelector(`[data-id="${CSS.escape(id)}"]`);
    const field = el("input", { type: "text", value: name, maxlength: "200", "aria-label": "Name of the conversation" });
    let over = false;
    const end = (keep) => {
      if (over) return;
      over = true;
      const text = field.value.trim();
      if (keep && text && text !== name) this.actions.rename(id, text);
      else this.draw();
      this.box.querySelector(`[data-id="${CSS.escape(id)}"] .open`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") end(false);
    });
    field.addEventListener("blur", () => end(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
  }

  /** Arrow keys move through the list. */
  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...this.box.querySelectorAll(".open")];
    const at = buttons.indexOf(document.activeElement);
    if (step === undefined || at < 0) return;
    event.preventDefault();
    buttons[at + step]?.focus();
  }
}
