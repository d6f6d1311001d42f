// The memory plan as a picture: a bar for each device, a part for each line of the plan.

import { getJson } from "./api.js";
import { el } from "./dom.js";
import { counted } from "./message.js";

const WAIT = 5000; // milliseconds between two readings of what is in use
const NAMES = {
  core_weights: "Weights of the layers",
  hot_experts: "Hot experts",
  cold_experts: "Cold experts",
  expert_staging: "Staging of experts",
  expert_spare: "Spare room for experts",
  embeddings: "Embeddings",
  head: "Head",
  kv: "KV cache",
  recurrent_state: "Recurrent states",
  verify_scratch: "Verification of drafts",
  staging: "Staging",
  workspace: "Workspace",
  logits: "Logits",
  draft_weights: "Weights of the draft",
  draft_kv: "KV cache of the draft",
  draft_state: "Hidden states for the draft",
  features: "Output rows of layers",
  graphs: "Captured steps",
  runtime: "Libraries and driver",
  reserve: "Reserve",
  snapshots: "Snapshots of prefixes",
  host_pages: "Pages of prefixes",
};
// Colours: a hue for what lines are for, and a shade for each line.
const KINDS = {
  core_weights: "weights", embeddings: "weights-2", head: "weights-3",
  hot_experts: "hot", cold_experts: "cold", expert_staging: "move", expert_spare: "move-2",
  kv: "state", recurrent_state: "state-2", snapshots: "state-3", host_pages: "state-4",
  draft_weights: "draft", draft_kv: "draft-2", draft_state: "draft-3", features: "draft-4",
  workspace: "work", staging: "work-2", verify_scratch: "work-3", logits: "work-4",
  runtime: "system", graphs: "system-2", reserve: "system-3",
};

/** Return bytes for people. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** Return a planned speed for people, with no more digits than are known. */
export function speed({ decode_tokens_per_s: rate, estimate }) {
  const text = Number(rate.toPrecision(estimate ? 2 : 3)).toLocaleString("en-US");
  return `${text} tok/s${estimate ? ", estimated" : ""}`;
}

/** Shows the plan of a model, and what is in use, while it is visible. */
export class MemoryView {
  constructor(target) {
    this.target = target;
    this.timer = 0;
    this.turn = 0; // the last call of `show`; earlier readings are dropped
    this.model = null;
  }

  /** Show a model of the server's list; null hides the view. */
  show(entry) {
    const model = entry?.id ?? null;
    clearTimeout(this.timer);
    this.turn += 1;
    if (model !== this.model) this.target.replaceChildren(el("p", { class: "help" }, "Reading the plan…"));
    this.model = model;
    if (entry?.context_length) this.read(model, this.turn);
    else if (entry) this.target.replaceChildren(el("p", { class: "help" }, entry.error ?? "The model has no plan before it is first loaded."));
  }

  async read(model, turn) {
    if (document.hidden) {
      this.timer = setTimeout(() => this.read(model, turn), WAIT);
      return;
    }
    let parts;
    try {
      const plan = await getJson(`/plan?model=${encodeURIComponent(model)}`);
      parts = planParts(plan);
    } catch (error) {
      parts = [el("p", { class: "help" }, error.message)];
    }
    if (turn !== this.turn) return;
    const opened = new Set([...this.target.querySelectorAll("details[open]")].map((details) => details.dataset.line));
    this.target.replaceChildren(...parts);
    for (const details of this.target.querySelectorAll("details")) details.open = opened.has(details.dataset.line);
    this.timer = setTimeout(() => this.read(model, turn), WAIT);
  }
}

function planParts(plan) {
  const { settings, predicted, in_use: inUse } = plan;
  const facts = [
    ["Context", `${counted(settings.context)} tokens`],
    ["Conversations at once", counted(settings.parallel)],
    ["Predicted speed", speed(predicted)],
    ["KV cache", settings.k_type === settings.v_type ? settings.k_type : `${settings.k_type}, ${settings.v_type}`],
  ];
  if (inUse) {
    for (const { device, planned_bytes: planned, used_bytes: used } of inUse.memory) {
      facts.push([`Allocated, ${device}`, `${size(used)} of ${size(planned)}`]);
    }
    facts.push(["Running, waiting", `${inUse.requests_running}, ${inUse.requests_waiting}`]);
  } else {
    facts.push(["State", "not loaded"]);
  }
  const places = plan.devices.map((device) => ({ ...device, title: device.name }));
  if (plan.host.lines.length) places.push({ ...plan.host, title: "Host memory" });
  return [
    el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    ...(inUse ? [cacheMeter(inUse)] : []),
    ...places.map(placeElement),
    ...(plan.lossy.length ? [el("p", { class: "help" }, `Lossy: ${plan.lossy.join(", ")}.`)] : []),
    ...plan.notes.map((note) => el("p", { class: "help" }, note)),
  ];
}

function cacheMeter({ cache_pages: pages, cache_pages_used: used }) {
  const label = `Pages of the KV cache in use: ${counted(used)} of ${counted(pages)}`;
  return el("div", { class: "meter" }, el("span", {}, label), el("meter", { min: "0", max: String(Math.max(1, pages)), value: used, "aria-label": label }));
}

function placeElement(place) {
  const taken = place.lines.reduce((sum, line) => sum + line.bytes, 0);
  const whole = Math.max(place.total_bytes, taken, 1);
  const bar = el("div", { class: "plan-bar", "aria-hidden": "true" });
  const lines = place.lines.filter((line) => line.bytes > 0);
  const legend = el("ul", { class: "legend" });
  for (const line of lines) {
    const kind = KINDS[line.name] ?? "other";
    const part = el("span", { class: `part ${kind}`, title: `${nameOf(line)}: ${size(line.bytes)}` });
    part.style.flexGrow = String(line.bytes / whole);
    bar.append(part);
    const row = legendRow(line, kind, `${place.title}/${line.name}`);
    const mark = (on) => () => part.classList.toggle("marked", on);
    row.addEventListener("pointerenter", mark(true));
    row.addEventListener("pointerleave", mark(false));
    row.addEventListener("focusin", mark(true));
    row.addEventListener("focusout", mark(false));
    legend.append(row);
  }
  const free = Math.max(0, place.free_bytes);
  if (free > 0) {
    const part = el("span", { class: "part free", title: `Free: ${size(free)}` });
    part.style.flexGrow = String(free / whole);
    bar.append(part);
    legend.append(el("li", { class: "free-row" }, el("span", { class: "swatch free" }), el("span", {}, "Free"), el("span", { class: "bytes" }, size(free))));
  }
  const experts = place.total_experts ? ` · ${counted(place.hot_experts)} of ${counted(place.total_experts)} experts hot` : "";
  return el("section", { class: "place" }, el("h2", {}, place.title), el("p", { class: "help" }, `${size(taken)} of ${size(place.total_bytes)} planned${experts}`), bar, legend);
}

function nameOf(line) {
  return NAMES[line.name] ?? line.name.replaceAll("_", " ");
}

function legendRow(line, kind, key) {
  return el(
    "li",
    {},
    el(
      "details",
      { "data-line": key },
      el("summary", {}, el("span", { class: `swatch ${kind}` }), el("span", {}, nameOf(line)), el("span", { class: "bytes" }, size(line.bytes))),
      el("p", { class: "help" }, line.why),
    ),
  );
}
