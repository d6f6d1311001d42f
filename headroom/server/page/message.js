// One message of a conversation on the page: text, thought, tool calls, numbers and actions.

import { alternatives, pathOf } from "./conversation.js";
import { codeBlock } from "./code.js";
import { copyButton, el, icon, iconButton, sendsMessage } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const ENDINGS = {
  length: "The answer ended at its limit of tokens.",
  stopped: "You stopped this answer.",
};

/** Return seconds for people. */
export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Return a number for people: "1,234". */
export function counted(value, word = "") {
  const text = value.toLocaleString("en-US");
  return word ? `${text} ${word}${value === 1 ? "" : "s"}` : text;
}

/** Return the numbers of an answer as a list of {text, title}. */
export function statisticsOf(stats) {
  const parts = [];
  if (stats.rate) parts.push({ text: `${stats.rate < 10 ? stats.rate.toFixed(1) : counted(Math.round(stats.rate))} tok/s`, title: "Tokens per second after the first one" });
  if (stats.first_s !== undefined) parts.push({ text: `first token ${seconds(stats.first_s)}`, title: "From sending to the first token, as this page saw it" });
  if (stats.generated) parts.push({ text: counted(stats.generated, "token"), title: stats.thought_tokens ? `${counted(stats.thought_tokens)} of them thoughts` : "Tokens of the answer" });
  if (stats.prompt) {
    const cached = `${counted(stats.cached ?? 0)} cached`;
    parts.push({ text: `prompt ${counted(stats.prompt)}, ${cached}`, title: "Tokens of the prompt, and those of them that were not computed again" });
  }
  if (stats.hit_rate !== undefined && stats.hit_rate !== null) {
    parts.push({ text: `${(100 * stats.hit_rate).toFixed(1)} % expert hits`, title: "Picks of experts that were in the device's memory" });
  }
  if (stats.guessed) {
    parts.push({ text: `${counted(stats.accepted)} of ${counted(stats.guessed)} drafts accepted`, title: "Tokens that were guessed ahead, and those of them that were right" });
  }
  return parts;
}

/** A message on the page; `actions` are what its buttons do. */
export class MessageView {
  constructor(conversation, node, actions) {
    this.conversation = conversation;
    this.node = node;
    this.actions = actions;
    this.body = el("div", { class: "body" });
    this.foot = el("footer", { class: "message-foot" });
    this.element = el("article", { class: `message ${node.role}`, "data-node": node.id }, this.body, this.foot);
    this.markdown = null;
    this.thought = null;
    this.callsShown = "";
    this.update(false, false);
  }

  /** Show the node as it is; `running`: its answer is coming; `last`: no message follows. */
  update(running, last) {
    this.running = running;
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    if (this.node.role === "user") this.showQuestion();
    else if (this.node.role === "tool") this.showResult();
    else this.showAnswer(last);
    if (!running) this.showFoot(last);
    else this.foot.replaceChildren(...(this.node.stats?.rate ? [this.numbers()] : []));
  }

  showQuestion() {
    this.element.setAttribute("aria-label", "You");
    if (this.body.childElementCount) return;
    this.body.replaceChildren(el("div", { class: "question" }, this.node.content));
  }

  showResult() {
    this.element.setAttribute("aria-label", "Result of a tool");
    if (this.body.childElementCount) return;
    this.body.replaceChildren(
      el("details", { class: "call" }, el("summary", {}, icon("tool"), "Result"), codeBlock(this.node.content, "", true)),
    );
  }

  showAnswer(last) {
    const { node } = this;
    this.element.setAttribute("aria-label", node.model ? `Answer of ${node.model}` : "Answer");
    if (!this.markdown) {
      this.text = el("div", { class: "markdown" });
      this.calls = el("div", { class: "calls" });
      this.notes = el("div", { class: "notes" });
      this.waiting = el("div", { class: "waiting" }, el("span"), el("span"), el("span"), el("em", { class: "waiting-text" }));
      this.leftOut = el("p", { class: "left-out", hidden: true });
      this.body.append(this.leftOut, this.text, this.calls, this.waiting, this.notes);
      this.markdown = new MarkdownView(this.text);
    }
    this.showLeftOut();
    if (node.thought) this.showThought();
    this.markdown.update(node.content);
    this.showCalls(last);
    this.waiting.hidden = !this.running || Boolean(node.content || node.thought || node.calls?.length);
    this.waiting.lastChild.textContent = node.waiting ?? "";
    this.showNotes(last);
  }

  /** Say how many turns the answer was given without, if there are more than for the last one. */
  showLeftOut() {
    const { conversation, node } = this;
    const before = pathOf(conversation, node.parent).findLast(({ leftOut }) => leftOut !== undefined);
    this.leftOut.hidden = !((node.leftOut ?? 0) > (before?.leftOut ?? 0));
    const turns = node.leftOut === 1 ? "turn is" : `${counted(node.leftOut ?? 0)} turns are`;
    if (!this.leftOut.hidden) this.leftOut.textContent = `The context is full: the oldest ${turns} left out from here on.`;
  }

  showThought() {
    const { node } = this;
    if (!this.thought) {
      const text = el("div", { class: "markdown" });
      const summary = el("summary", {}, icon("thought"), el("span"));
      this.thought = el("details", { class: "thought" }, summary, text);
      this.thoughtLabel = summary.lastChild;
      this.thoughtMarkdown = new MarkdownView(text);
      this.leftOut.after(this.thought);
      this.thought.addEventListener("toggle", () => this.showThought());
    }
    const thinking = this.running && !node.content && !node.calls?.length;
    this.thought.classList.toggle("thinking", thinking);
    const took = node.stats?.thought_s;
    this.thoughtLabel.textContent = thinking ? "Thinking…" : took ? `Thought for ${seconds(took)}` : "Thought";
    // A folded thought costs nothing to show.
    if (this.thought.open) this.thoughtMarkdown.update(node.thought);
  }

  showCalls(last) {
    const calls = this.node.calls ?? [];
    const open = last && !this.running && calls.length > 0;
    const state = JSON.stringify([calls, open]);
    if (state === this.callsShown) return;
    this.callsShown = state;
    this.calls.replaceChildren(...calls.map((call, index) => this.callElement(call, index, open)));
    if (!open) return;
    const send = el("button", { type: "button", class: "primary-button" }, calls.length > 1 ? "Send results" : "Send result");
    send.addEventListener("click", () => {
      const fields = [...this.calls.querySelectorAll("textarea")];
      this.actions.sendResults(this.node, fields.map((field) => field.value));
    });
    this.calls.append(send);
  }

  callElement(call, index, open) {
    const box = el(
      "div",
      { class: "call" },
      el("p", { class: "call-name" }, icon("tool"), "Calls ", el("code", {}, call.name)),
      codeBlock(pretty(call.arguments), "json", !this.running),
    );
    if (open) {
      const id = `result-${this.node.id}-${index}`;
      box.append(el("label", { for: id }, `Result of ${call.name}`), el("textarea", { id, rows: "2", class: "mono", spellcheck: "false" }));
    }
    return box;
  }

  showNotes(last) {
    const { node } = this;
    const notes = [];
    if (node.error && !this.running) {
      const retry = el("button", { type: "button", class: "quiet-button", onclick: () => this.actions.retry(node) }, icon("redo"), "Try again");
      notes.push(el("div", { class: "failure", role: "alert" }, el("p", {}, node.error.message), retry));
    } else if (!this.running && ENDINGS[node.finish]) {
      const more =
        last && node.content
          ? el("button", { type: "button", class: "quiet-button", onclick: () => this.actions.goOn(node) }, icon("play"), "Continue")
          : null;
      notes.push(el("div", { class: "ending" }, el("p", {}, ENDINGS[node.finish]), more));
    } else if (!this.running && !node.content && !node.calls?.length && !node.error) {
      notes.push(el("div", { class: "ending" }, el("p", {}, "The answer is empty.")));
    }
    this.notes.replaceChildren(...notes);
  }

  showFoot(last) {
    const { node, actions, conversation } = this;
    const parts = [];
    const others = alternatives(conversation, node);
    if (others.length > 1) parts.push(this.branches(others));
    const buttons = [];
    if (node.role !== "tool") {
      if (node.content) buttons.push(copyButton(node.role === "assistant" ? "Copy answer" : "Copy message", () => node.content));
      buttons.push(iconButton("edit", "Edit", () => this.edit()));
    } // the result of a tool is a block of code, with a button of its own
    if (node.role === "assistant") buttons.push(iconButton("redo", "Regenerate", () => actions.regenerate(node)));
    parts.push(el("span", { class: "buttons" }, ...buttons));
    if (node.stats) parts.push(this.numbers());
    this.foot.replaceChildren(...parts);
    this.foot.classList.toggle("last", last);
  }

  numbers() {
    return el("span", { class: "numbers" }, ...statisticsOf(this.node.stats).map(({ text, title }) => el("span", { title }, text)));
  }

  branches(others) {
    const at = others.indexOf(this.node);
    const go = (step) => () => this.actions.choose(others[at + step].id);
    return el(
      "span",
      { class: "branches", role: "group", "aria-label": "Versions" },
      iconButton("left", "Previous version", go(-1), { disabled: at === 0 }),
      el("span", {}, `${at + 1}/${others.length}`),
      iconButton("right", "Next version", go(1), { disabled: at === others.length - 1 }),
    );
  }

  /** Let the person change the message in its place. */
  edit() {
    const { node, actions } = this;
    const question = node.role === "user";
    const field = el("textarea", { class: "edit-field", value: node.content, "aria-label": question ? "Edit your message" : "Edit the answer", rows: "3" });
    const close = () => {
      form.remove();
      this.body.hidden = this.foot.hidden = false;
      this.element.querySelector('[aria-label="Edit"]')?.focus();
    };
    const form = el(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          const text = field.value;
          if (!text.trim()) return;
          close();
          if (text !== node.content || question) actions.edited(node, text);
        },
      },
      field,
      el(
        "div",
        { class: "edit-buttons" },
        el("button", { type: "button", class: "quiet-button", onclick: close }, "Cancel"),
        el("button", { type: "submit", class: "primary-button" }, question ? "Send" : "Save"),
      ),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (question && sendsMessage(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    const height = Math.min(this.body.scrollHeight + 24, window.innerHeight / 2);
    field.style.height = `${Math.max(72, height)}px`;
    this.body.hidden = this.foot.hidden = true;
    this.element.append(form);
    field.focus();
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
