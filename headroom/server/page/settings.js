// The settings of a conversation: what is sent with each request, and the form that changes it.

import { byId, el } from "./dom.js";
import { counted } from "./message.js";

// Sampling settings; an empty field leaves the choice to the model's own defaults.
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.05, help: "0 takes the likeliest token; higher is freer." },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01, help: "Draws from the likeliest tokens that have this share together." },
  { name: "top_k", label: "Top-k", min: 0, max: 1000, step: 1, whole: true, help: "Draws from so many tokens at most; 0: from all." },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, help: "Leaves out tokens below this share of the likeliest one." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.01, help: "Above 1, tokens that came before are less likely." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, help: "Above 0, new subjects are more likely." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, help: "Above 0, frequent tokens are less likely." },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1_000_000, step: 1, whole: true, help: "In tokens; empty: until the context is full." },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, whole: true, help: "The same seed gives the same answer." },
];
const THINKING = {
  on: { enable_thinking: true },
  off: { enable_thinking: false },
  low: { reasoning_effort: "low" },
  medium: { reasoning_effort: "medium" },
  high: { reasoning_effort: "high" },
};
const THINKING_LABELS = { "": "As the model does", on: "On", off: "Off", low: "On, briefly", medium: "On, medium", high: "On, at length" };

/** Return the fields that settings add to a request; throw an Error if they cannot be sent. */
export function requestFields(settings) {
  const fields = {};
  for (const { name } of NUMBERS) {
    if (Number.isFinite(settings[name])) fields[name] = settings[name];
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  Object.assign(fields, THINKING[settings.thinking] ?? {});
  const tools = readTools(settings.tools ?? "");
  if (tools.length) fields.tools = tools;
  return fields;
}

/** Return the tools of a JSON text; throw an Error that says what is wrong with it. */
export function readTools(text) {
  if (!text.trim()) return [];
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools in the settings are not JSON: ${error.message}`);
  }
  const tools = Array.isArray(given) ? given : [given];
  return tools.map((tool, index) => {
    const known = typeof tool === "object" && tool !== null ? tool : {};
    const whole = known.type === "function" ? known : { type: "function", function: known };
    if (typeof whole.function?.name !== "string") throw new Error(`Tool ${index + 1} in the settings has no name.`);
    return whole;
  });
}

/** The form of the settings; it calls `changed` with all settings after each change. */
export class SettingsForm {
  constructor(changed) {
    this.changed = changed;
    this.settings = {};
    this.form = byId("settings-form");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.inputs = new Map();
    for (const field of NUMBERS) byId("sampling-fields").append(this.numberField(field));
    for (const name of ["system", "stop", "tools"]) this.watchText(name);
    this.thinking = byId("setting-thinking");
    for (const [value, label] of Object.entries(THINKING_LABELS)) this.thinking.append(el("option", { value }, label));
    this.thinking.addEventListener("change", () => this.set("thinking", this.thinking.value));
    byId("settings-reset").addEventListener("click", () => {
      this.show({});
      this.changed(this.settings);
    });
  }

  /** Show the settings of a conversation. */
  show(settings) {
    this.settings = { ...settings };
    for (const [name, input] of this.inputs) {
      input.value = settings[name] ?? "";
      this.check(name, input);
    }
    this.thinking.value = settings.thinking ?? "";
  }

  /** Show what the model does where a field is empty; null: it is not known yet. */
  showDefaults(props) {
    const generation = props?.default_generation_settings;
    for (const { name } of NUMBERS) {
      const value = generation?.params?.[name];
      this.inputs.get(name).placeholder = value ?? (name === "max_tokens" && generation ? `≤ ${counted(generation.n_ctx)}` : "default");
    }
    byId("settings-source").textContent = generation ? `Empty fields: ${generation.source}.` : "Empty fields are the model's defaults.";
    byId("thinking-field").hidden = props !== null && !props?.reasoning?.supported;
  }

  numberField({ name, label, min, max, step, whole, help }) {
    const id = `setting-${name}`;
    const input = el("input", { id, name, type: "number", min, max, step: whole ? 1 : "any", inputmode: whole ? "numeric" : "decimal", placeholder: "default", autocomplete: "off", "aria-describedby": `${id}-help` });
    input.dataset.step = step;
    input.addEventListener("change", () => {
      const value = input.value === "" ? undefined : Number(input.value);
      this.check(name, input);
      if (input.validity.valid) this.set(name, value);
    });
    this.inputs.set(name, input);
    return el("div", { class: "field compact" }, el("label", { for: id }, label), input, el("p", { class: "help", id: `${id}-help` }, help));
  }

  watchText(name) {
    const input = byId(`setting-${name}`);
    this.inputs.set(name, input);
    input.addEventListener("change", () => {
      this.check(name, input);
      this.set(name, input.value);
    });
  }

  set(name, value) {
    if (value === undefined || value === "") delete this.settings[name];
    else this.settings[name] = value;
    this.changed(this.settings);
  }

  /** Show whether a field can be sent. */
  check(name, input) {
    let wrong = input.validity.valid ? "" : input.validationMessage;
    if (name === "tools") {
      try {
        readTools(input.value);
      } catch (error) {
        wrong = error.message;
      }
      byId("tools-error").textContent = wrong;
    }
    input.setAttribute("aria-invalid", String(Boolean(wrong)));
  }
}
