// The page: which conversation is shown, which answers run, and what keys and buttons do.

import { Answer } from "./answer.js";
import { ApiError, getJson, setKeyQuestion } from "./api.js";
import { addNode, alternatives, asMarkdown, chooseBranch, newConversation, pathOf, readExport, titleOf, TOO_LONG, turnsToLeaveOut } from "./conversation.js";
import { announce, byId, download, drawIcons, el, icon, sendsMessage, toast, TOUCH } from "./dom.js";
import { ExpertsView } from "./experts.js";
import { MemoryView } from "./memory.js";
import { counted, MessageView } from "./message.js";
import { requestFields, SettingsForm } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { openStore, remember, remembered } from "./store.js";

const SAVE_WAIT = 1500; // milliseconds between two savings of a running answer
const MODELS_WAIT = 3000; // milliseconds until an unreachable server is asked again
const LOADING_WAIT = 1000; // milliseconds between two looks at a load
const FEWEST_FRAME = 33; // milliseconds between two drawings of a running answer
const MOST_ATTACHED = 1 << 20; // bytes of a text file
const NARROW = matchMedia("(max-width: 900px)");
const EXAMPLES = ["Explain how a mixture of experts works", "Write a Python function that merges sorted lists", "What should I ask before I rent a flat?"];

class Page {
  constructor(store) {
    this.store = store;
    this.current = null; // the conversation that is shown; a new one is stored with its first message
    this.answers = new Map(); // running answers by the ids of their conversations
    this.views = new Map(); // message views by the ids of their nodes
    this.models = [];
    this.model = null; // the name of the chosen one
    this.props = null; // of the chosen model; null: not known yet
    this.sticky = true; // the end of the conversation stays in sight
    this.room = 0; // how far the log can be scrolled, in pixels, by its last layout
    this.frame = 0;
    this.sidebar = new Sidebar(store, {
      open: (id) => this.open(id),
      rename: (id, title) => this.rename(id, title),
      remove: (id, title) => this.remove(id, title),
    });
    this.settings = new SettingsForm((settings) => this.settingsChanged(settings));
    this.memory = new MemoryView(byId("view-memory"));
    this.experts = new ExpertsView(byId("view-experts"));
    this.input = byId("composer-input");
    this.log = byId("log");
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel("headroom") : null;
  }

  async start() {
    this.bind();
    this.drawTheme(window.headroomTheme.get());
    this.showSidebar(!NARROW.matches && remembered("sidebar", true));
    this.showPanel(!NARROW.matches && remembered("panel", false), remembered("tab", "settings"), false);
    if (!this.store.lasting) toast("This browser stores nothing here: conversations are lost when you leave the page.");
    await this.sidebar.refresh();
    const asked = new URLSearchParams(location.hash.slice(1)).get("chat");
    if (!asked || !(await this.open(asked, { focus: false }))) this.newChat({ focus: !NARROW.matches });
    await this.readModels();
  }

  /* Models. */

  async readModels() {
    clearTimeout(this.modelsTimer);
    try {
      const { data } = await getJson("/v1/models");
      this.models = data;
      this.showLoading();
    } catch (error) {
      byId("banner").classList.remove("calm");
      this.showBanner(error.message);
      const later = error instanceof ApiError && error.isTemporary;
      if (later) this.modelsTimer = setTimeout(() => this.readModels(), MODELS_WAIT);
      return;
    }
    const names = this.models.map(({ id }) => id);
    const wished = this.model ?? remembered("model", null);
    await this.chooseModel(names.includes(wished) ? wished : (names[0] ?? null));
  }

  /** Say how far the server's first load is, and ask again until it is over. */
  showLoading() {
    const loading = this.models.find((model) => model.loading !== undefined);
    byId("banner").classList.toggle("calm", Boolean(loading));
    this.showBanner(loading ? `${loading.id} is being loaded: ${Math.floor(100 * loading.loading)} % are done.` : "");
    if (loading) this.modelsTimer = setTimeout(() => this.readModels(), LOADING_WAIT);
  }

  get modelEntry() {
    return this.models.find(({ id }) => id === this.model);
  }

  /** The context of the chosen model in tokens; undefined while it is not known. */
  get context() {
    return this.props?.default_generation_settings?.n_ctx ?? this.modelEntry?.context_length;
  }

  async chooseModel(name) {
    const other = name !== this.model;
    this.model = name;
    if (other) this.props = null;
    this.drawModels();
    // A model that is not loaded is not loaded to show its settings: its first message does that.
    if (this.props === null && this.modelEntry?.loaded) {
      try {
        const props = await getJson(`/props?model=${encodeURIComponent(name)}`);
        if (name === this.model) this.props = props;
      } catch {
        // The page works without: settings show no defaults.
      }
    }
    this.settings.showDefaults(this.props);
    this.drawComposer();
    this.showTab();
  }

  drawModels() {
    const select = byId("model");
    const several = this.models.length > 1;
    select.hidden = !several;
    byId("model-name").hidden = several;
    byId("model-name").textContent = this.model ?? "";
    const options = this.models.map(({ id, loaded, error }) =>
      el("option", { value: id, disabled: Boolean(error) }, error ? `${id} (cannot be loaded)` : loaded ? id : `${id} (not loaded)`),
    );
    select.replaceChildren(...options);
    select.value = this.model ?? "";
    const entry = this.modelEntry;
    byId("model-state").textContent = entry?.context_length ? `${counted(entry.context_length)} tokens of context` : "";
  }

  showBanner(text) {
    const banner = byId("banner");
    banner.hidden = !text;
    if (!text) return banner.replaceChildren();
    if (banner.firstChild?.textContent === text) return undefined;
    const retry = el("button", { type: "button", class: "quiet-button", onclick: () => this.readModels() }, "Try again");
    return banner.replaceChildren(el("span", {}, text), ...(banner.classList.contains("calm") ? [] : [retry]));
  }

  /* Conversations. */

  newChat({ focus = true } = {}) {
    this.show(newConversation(remembered("settings", {})));
    if (focus) this.input.focus();
  }

  async open(id, { focus = true } = {}) {
    const conversation = this.answers.get(id)?.conversation ?? (await this.store.load(id));
    if (!conversation) return false;
    this.show(conversation);
    if (NARROW.matches) this.showSidebar(false);
    if (focus && !NARROW.matches) this.input.focus();
    return true;
  }

  show(conversation) {
    this.current = conversation;
    this.sticky = true;
    const kept = conversation.leaf !== null;
    history.replaceState(null, "", kept ? `#chat=${conversation.id}` : location.pathname);
    this.settings.show(conversation.settings);
    this.drawMessages();
    this.drawTitle();
    this.sidebar.show(conversation.id, new Set(this.answers.keys()));
  }

  drawTitle() {
    const title = this.current.title || "New chat";
    byId("title").textContent = title;
    document.title = this.current.title ? `${title} · headroom` : "headroom";
    byId("export").hidden = this.current.leaf === null;
  }

  async rename(id, title) {
    const conversation = id === this.current.id ? this.current : await this.store.load(id);
    if (!conversation) return;
    conversation.title = title;
    await this.save(conversation);
    if (conversation === this.current) this.drawTitle();
  }

  async remove(id, title) {
    if (!(await confirmed("Delete this conversation?", `“${title}” is deleted from this browser. This cannot be undone.`))) return;
    this.answers.get(id)?.stop();
    this.removed ??= new Set();
    this.removed.add(id);
    await this.store.remove(id);
    this.channel?.postMessage({ id });
    await this.sidebar.refresh();
    announce("The conversation was deleted.");
    if (id === this.current.id) this.newChat();
  }

  async save(conversation) {
    if (this.removed?.has(conversation.id)) return;
    try {
      await this.store.save(conversation);
    } catch (error) {
      toast(`The conversation was not saved: ${error.message}`);
      return;
    }
    await this.sidebar.refresh();
    this.channel?.postMessage({ id: conversation.id });
  }

  /** Another tab has changed a conversation. */
  async otherTab({ id }) {
    await this.sidebar.refresh();
    if (id !== this.current.id || this.answers.has(id) || this.current.leaf === null) return;
    const conversation = await this.store.load(id);
    if (conversation) this.show(conversation);
  }

  settingsChanged(settings) {
    this.current.settings = { ...settings };
    remember("settings", settings);
    this.drawComposer();
    if (this.current.leaf !== null) this.save(this.current);
  }

  /* Messages. */

  get actions() {
    return {
      regenerate: (node) => this.regenerate(node),
      retry: (node) => this.retry(node),
      goOn: (node) => this.goOn(node),
      edited: (node, text) => this.edited(node, text),
      choose: (id) => this.chooseVersion(id),
      sendResults: (node, results) => this.sendResults(node, results),
    };
  }

  /** Show the messages of the path; those that are on the page stay, with what is open in them. */
  drawMessages() {
    if (this.viewed !== this.current) this.views.clear();
    this.viewed = this.current;
    const path = pathOf(this.current);
    const running = this.answers.get(this.current.id)?.node;
    const box = byId("messages");
    let place = box.firstElementChild;
    path.forEach((node, index) => {
      const view = this.views.get(node.id) ?? new MessageView(this.current, node, this.actions);
      this.views.set(node.id, view);
      view.update(node === running, index === path.length - 1);
      if (view.element === place) place = place.nextElementSibling;
      else box.insertBefore(view.element, place);
    });
    while (place) {
      const next = place.nextElementSibling;
      place.remove();
      place = next;
    }
    this.drawWelcome(path.length === 0);
    this.drawComposer();
    this.scrollToEnd();
  }

  drawWelcome(wanted) {
    const box = byId("welcome");
    box.hidden = !wanted;
    if (!wanted || box.childElementCount) return;
    const example = (text) =>
      el("button", { type: "button", class: "example", onclick: () => this.fillIn(text) }, text);
    box.append(el("p", { class: "greeting" }, "What would you like to know?"), el("div", { class: "examples" }, ...EXAMPLES.map(example)));
  }

  fillIn(text) {
    this.input.value = text;
    this.resizeInput();
    this.drawComposer();
    this.input.focus();
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || this.answers.has(this.current.id)) return;
    if (!this.settingsAreRight()) return;
    this.input.value = "";
    this.resizeInput();
    const question = addNode(this.current, this.current.leaf, { role: "user", content: text });
    this.answerTo(question.id);
  }

  settingsAreRight() {
    try {
      requestFields(this.current.settings);
      return true;
    } catch (error) {
      toast(error.message);
      this.showPanel(true, "settings");
      return false;
    }
  }

  /** Ask for an answer after a message, as a new branch. */
  answerTo(parent) {
    const node = addNode(this.current, parent, { role: "assistant", model: this.model ?? "" });
    this.run(node, parent);
  }

  regenerate(node) {
    if (this.answers.has(this.current.id) || !this.settingsAreRight()) return;
    this.answerTo(node.parent);
  }

  /** Run a failed request again; what had come of its answer is kept as another version. */
  retry(node) {
    if (node.content || node.calls?.length) return this.regenerate(node);
    if (this.answers.has(this.current.id) || !this.settingsAreRight()) return undefined;
    node.thought = "";
    node.model = this.model ?? "";
    return this.run(node, node.parent);
  }

  goOn(node) {
    if (this.answers.has(this.current.id) || !this.settingsAreRight()) return;
    this.run(node, node.id, { continue_final_message: true, add_generation_prompt: false });
  }

  edited(node, text) {
    if (this.answers.has(this.current.id)) return;
    if (node.role === "assistant") {
      const { role, model, thought, calls } = node;
      addNode(this.current, node.parent, { role, model, thought, calls, content: text, finish: "stop" });
      this.save(this.current);
      this.show(this.current);
      return;
    }
    if (!this.settingsAreRight()) return;
    const renamed = this.current.title === titleOf(node.content) && node.parent === null;
    const question = addNode(this.current, node.parent, { role: "user", content: text });
    if (renamed) this.current.title = titleOf(text);
    this.answerTo(question.id);
  }

  chooseVersion(id) {
    if (this.answers.has(this.current.id)) return;
    chooseBranch(this.current, id);
    this.drawMessages();
    this.views.get(id)?.element.scrollIntoView({ block: "nearest" });
    const node = this.current.nodes[id];
    const others = alternatives(this.current, node);
    announce(`Version ${others.indexOf(node) + 1} of ${others.length}.`);
    this.save(this.current);
  }

  sendResults(node, results) {
    if (this.answers.has(this.current.id) || !this.settingsAreRight()) return;
    let parent = node.id;
    node.calls.forEach((call, index) => {
      parent = addNode(this.current, parent, { role: "tool", callId: call.id, content: results[index] }).id;
    });
    this.answerTo(parent);
  }

  /** Run a request with the messages up to `to`, whose answer goes into a node. */
  async run(node, to, more = {}) {
    const conversation = this.current;
    const fields = requestFields(conversation.settings);
    const body = { model: this.model ?? undefined, ...fields, ...more };
    node.leftOut = this.context ? turnsToLeaveOut(conversation, to, this.context, fields.max_tokens) : 0;
    const answer = new Answer(conversation, node, to, body, () => this.answerChanged(answer));
    this.answers.set(conversation.id, answer);
    this.sticky = true;
    this.show(conversation);
    this.save(conversation);
    announce("The answer begins.");
    const saving = setInterval(() => this.store.save(conversation).catch(() => {}), SAVE_WAIT);
    await answer.run();
    clearInterval(saving);
    this.answers.delete(conversation.id);
    conversation.updated = Date.now();
    await this.save(conversation);
    if (conversation === this.current) {
      this.drawMessages();
      this.sidebar.show(conversation.id, new Set(this.answers.keys()));
    } else {
      this.sidebar.show(this.current.id, new Set(this.answers.keys()));
    }
    announce(node.error ? `The answer failed: ${node.error.message}` : node.finish === "stopped" ? "Stopped." : "The answer is complete.");
    if (node.error?.code === TOO_LONG) this.props = null; // the model may have been loaded anew, with another context
    if (!this.modelEntry?.loaded || this.props === null) this.readModels();
  }

  stop() {
    const answer = this.answers.get(this.current.id);
    answer?.stop();
    return Boolean(answer);
  }

  /** Draw a running answer soon; the more a drawing costs, the fewer there are. */
  answerChanged(answer) {
    if (answer.conversation !== this.current || this.frame) return;
    const wait = Math.max(FEWEST_FRAME, 5 * (this.cost ?? 0));
    this.frame = setTimeout(() => requestAnimationFrame(() => {
      this.frame = 0;
      const view = this.views.get(answer.node.id);
      if (!view || this.answers.get(this.current.id) !== answer) return;
      const began = performance.now();
      view.update(true, true);
      this.scrollToEnd();
      this.cost = Math.min(400, performance.now() - began);
    }), wait);
  }

  /** The layout has changed: keep the end in sight, unless the reader has left it. */
  followEnd() {
    this.room = this.log.scrollHeight - this.log.clientHeight;
    this.sticky ||= this.atEnd;
    this.scrollToEnd();
  }

  scrollToEnd() {
    if (this.sticky) this.log.scrollTop = this.log.scrollHeight;
    byId("jump").hidden = this.sticky;
  }

  get atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    return scrollHeight - scrollTop - clientHeight < 60;
  }

  /* The message field. */

  drawComposer() {
    const running = this.answers.has(this.current?.id);
    const send = byId("send");
    const label = running ? "Stop" : "Send";
    if (send.getAttribute("aria-label") !== label || !send.firstChild) {
      send.replaceChildren(icon(running ? "stop" : "send"));
      send.setAttribute("aria-label", label);
      send.title = running ? "Stop (Esc)" : TOUCH.matches ? "Send" : "Send (Enter)";
    }
    send.classList.toggle("stop", running);
    send.disabled = !running && !this.input.value.trim();
    const thinks = this.props?.reasoning?.supported ?? false;
    const on = this.current?.settings.thinking !== "off";
    byId("think").hidden = !thinks;
    byId("think").setAttribute("aria-pressed", String(on));
    this.drawContext();
  }

  drawContext() {
    const most = this.context;
    const last = pathOf(this.current).findLast((node) => node.stats?.prompt);
    const used = last ? last.stats.prompt + (last.stats.generated ?? 0) : 0;
    const box = byId("context");
    box.textContent = most && used ? `${counted(used)} of ${counted(most)} tokens` : "";
    box.classList.toggle("full", Boolean(most) && used > 0.9 * most);
    box.title = "Tokens of this conversation, and the context of the model";
  }

  resizeInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, window.innerHeight * 0.4)}px`;
  }

  async attach(files) {
    for (const file of files) {
      if (file.size > MOST_ATTACHED) {
        toast(`${file.name} has ${counted(file.size)} bytes; at most ${counted(MOST_ATTACHED)} can be added.`);
        continue;
      }
      const text = await file.text();
      if (text.includes("\0")) {
        toast(`${file.name} is not a text file.`);
        continue;
      }
      const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
      const fence = "`".repeat(longest + 1);
      const before = this.input.value ? `${this.input.value.trimEnd()}\n\n` : "";
      this.input.value = `${before}${file.name}\n${fence}${file.name.split(".").at(-1)}\n${text.trimEnd()}\n${fence}\n\n`;
    }
    this.resizeInput();
    this.drawComposer();
    this.input.focus();
  }

  /* The frame of the page. */

  showSidebar(open) {
    byId("app").classList.toggle("with-sidebar", open);
    byId("sidebar").inert = !open;
    byId("sidebar-open").setAttribute("aria-expanded", String(open));
    if (!NARROW.matches) remember("sidebar", open);
    this.drawBackdrop();
  }

  get sidebarOpen() {
    return byId("app").classList.contains("with-sidebar");
  }

  get panelOpen() {
    return !byId("panel").hidden;
  }

  showPanel(open, tab = remembered("tab", "settings"), focus = true) {
    byId("app").classList.toggle("with-panel", open);
    byId("panel").hidden = !open;
    byId("panel-open").setAttribute("aria-expanded", String(open));
    if (!NARROW.matches) remember("panel", open);
    this.selectTab(tab, { focus: open && focus });
    this.drawBackdrop();
  }

  drawBackdrop() {
    const covered = NARROW.matches && (this.sidebarOpen || this.panelOpen);
    byId("backdrop").hidden = !covered;
    byId("main").inert = covered;
  }

  selectTab(name, { focus = false } = {}) {
    for (const tab of document.querySelectorAll('[role="tab"]')) {
      const selected = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(selected));
      tab.tabIndex = selected ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !selected;
      if (selected && focus) tab.focus({ preventScroll: true });
    }
    this.tab = name;
    remember("tab", name);
    this.showTab();
  }

  /** Let the views that read from the server do so only while they are seen. */
  showTab() {
    const shown = (name) => (this.panelOpen && this.tab === name ? (this.modelEntry ?? null) : null);
    this.memory.show(shown("memory"));
    this.experts.show(shown("experts"));
  }

  drawTheme(theme) {
    const [name, label] = { auto: ["auto", "Colours: as the system"], light: ["sun", "Colours: light"], dark: ["moon", "Colours: dark"] }[theme];
    const button = byId("theme");
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", label);
    button.title = label;
  }

  async exportCurrent() {
    const dialog = byId("export-dialog");
    const kind = await answerOf(dialog);
    const name = (this.current.title || "chat").replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 50) || "chat";
    if (kind === "markdown") download(`${name}.md`, asMarkdown(this.current), "text/markdown");
    if (kind === "json") download(`${name}.json`, JSON.stringify(this.current, null, 1), "application/json");
  }

  async exportAll() {
    const rows = await this.store.list();
    const conversations = await Promise.all(rows.map(({ id }) => this.store.load(id)));
    download("headroom-chats.json", JSON.stringify({ conversations }, null, 1), "application/json");
  }

  async importFile(file) {
    try {
      const conversations = readExport(await file.text());
      for (const conversation of conversations) await this.store.save(conversation);
      await this.sidebar.refresh();
      toast(`${counted(conversations.length, "conversation")} imported.`);
      await this.open(conversations[0].id);
    } catch (error) {
      toast(error.message);
    }
  }

  /* Keys and buttons. */

  bind() {
    const on = (id, event, act) => byId(id).addEventListener(event, act);
    on("new-chat", "click", () => {
      this.newChat();
      if (NARROW.matches) this.showSidebar(false);
    });
    on("sidebar-open", "click", () => {
      this.showSidebar(!this.sidebarOpen);
      if (NARROW.matches && this.sidebarOpen) byId("new-chat").focus();
    });
    on("sidebar-close", "click", () => this.closeSidebar());
    on("panel-open", "click", () => this.showPanel(!this.panelOpen));
    on("panel-close", "click", () => this.closePanel());
    on("backdrop", "click", () => this.closeDrawers());
    on("theme", "click", () => {
      const theme = window.headroomTheme.next();
      this.drawTheme(theme);
      announce(byId("theme").title);
      this.showTab();
    });
    on("shortcuts", "click", () => byId("shortcuts-dialog").showModal());
    on("export", "click", () => this.exportCurrent());
    on("export-all", "click", () => this.exportAll());
    on("import", "click", () => byId("import-file").click());
    on("import-file", "change", (event) => {
      const [file] = event.target.files;
      if (file) this.importFile(file);
      event.target.value = "";
    });
    on("attach", "click", () => byId("attach-file").click());
    on("attach-file", "change", async (event) => {
      await this.attach([...event.target.files]);
      event.target.value = "";
    });
    on("model", "change", (event) => {
      remember("model", event.target.value);
      this.chooseModel(event.target.value);
    });
    on("think", "click", () => {
      const on = byId("think").getAttribute("aria-pressed") === "true";
      const settings = { ...this.current.settings, thinking: on ? "off" : "on" };
      this.settings.show(settings);
      this.settingsChanged(settings);
    });
    on("composer", "submit", (event) => {
      event.preventDefault();
      if (!this.stop()) this.submit();
    });
    on("composer-input", "input", () => {
      this.resizeInput();
      this.drawComposer();
    });
    on("composer-input", "keydown", (event) => this.composerKey(event));
    on("jump", "click", () => {
      this.sticky = true;
      this.scrollToEnd();
      this.input.focus();
    });
    on("log", "scroll", () => {
      const { scrollHeight, clientHeight } = this.log;
      if (scrollHeight - clientHeight !== this.room) return; // the layout moved it, not the reader
      this.sticky = this.atEnd;
      byId("jump").hidden = this.sticky;
    });
    // What the reader opens stays where it is; below it, a running answer is still followed.
    on("messages", "click", (event) => {
      if (event.target.closest("summary") && !this.answers.has(this.current.id)) this.sticky = false;
    });
    const resized = new ResizeObserver(() => this.followEnd());
    resized.observe(byId("messages"));
    resized.observe(this.log);
    document.querySelector('[role="tablist"]').addEventListener("click", (event) => {
      const tab = event.target.closest('[role="tab"]');
      if (tab) this.selectTab(tab.id.slice(4));
    });
    document.querySelector('[role="tablist"]').addEventListener("keydown", (event) => this.tabKey(event));
    document.addEventListener("keydown", (event) => this.key(event));
    this.bindDrop();
    NARROW.addEventListener("change", () => {
      this.showSidebar(!NARROW.matches);
      if (NARROW.matches) this.showPanel(false);
    });
    if (this.channel) this.channel.onmessage = (event) => this.otherTab(event.data);
    window.addEventListener("hashchange", () => {
      const id = new URLSearchParams(location.hash.slice(1)).get("chat");
      if (id && id !== this.current.id) this.open(id);
    });
    setKeyQuestion(askForKey);
  }

  bindDrop() {
    const main = byId("main");
    main.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    main.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  composerKey(event) {
    if (sendsMessage(event)) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.input.value && !this.answers.has(this.current.id)) {
      const last = pathOf(this.current).findLast((node) => node.role === "user");
      if (!last) return;
      event.preventDefault();
      this.views.get(last.id).edit();
    }
  }

  tabKey(event) {
    const names = ["settings", "memory", "experts"];
    const at = names.indexOf(this.tab);
    const to = { ArrowRight: (at + 1) % 3, ArrowLeft: (at + 2) % 3, Home: 0, End: 2 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.selectTab(names[to], { focus: true });
  }

  key(event) {
    if (document.querySelector("dialog[open]")) return;
    const command = event.ctrlKey || event.metaKey;
    const typing = /^(?:INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName ?? "");
    const act = (what) => {
      event.preventDefault();
      what();
    };
    if (event.key === "Escape") this.escape();
    else if (command && event.key.toLowerCase() === "k") act(() => this.focusSearch());
    else if (command && event.shiftKey && event.key.toLowerCase() === "o") act(() => this.newChat());
    else if (command && event.key === ",") act(() => (this.panelOpen && this.tab === "settings" ? this.closePanel() : this.showPanel(true, "settings")));
    else if (typing || command || event.altKey) return;
    else if (event.key === "/") act(() => this.input.focus());
    else if (event.key === "?") act(() => byId("shortcuts-dialog").showModal());
  }

  escape() {
    if (NARROW.matches && (this.sidebarOpen || this.panelOpen)) this.closeDrawers();
    else this.stop();
  }

  focusSearch() {
    this.showSidebar(true);
    byId("search").focus();
    byId("search").select();
  }

  closeSidebar() {
    this.showSidebar(false);
    byId("sidebar-open").focus();
  }

  closePanel() {
    this.showPanel(false);
    byId("panel-open").focus();
  }

  closeDrawers() {
    if (this.panelOpen) this.closePanel();
    if (this.sidebarOpen) this.closeSidebar();
  }
}

/** Show a dialog; return the value of the button that closed it, "" for none. */
function answerOf(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

async function confirmed(title, text) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  return (await answerOf(byId("confirm-dialog"))) === "yes";
}

/** Ask for the API key; `wrong` says what was wrong with the last one. */
async function askForKey(wrong) {
  const [dialog, input] = [byId("key-dialog"), byId("key-input")];
  byId("key-error").textContent = wrong;
  input.value = "";
  byId("key-cancel").onclick = () => dialog.close("");
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    dialog.close("given");
  };
  return (await answerOf(dialog)) === "given" ? input.value.trim() : null;
}

drawIcons();
const page = new Page(await openStore());
await page.start();
document.documentElement.dataset.ready = "true"; // for tests: all of the page works now
