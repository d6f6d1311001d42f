// A conversation is a tree: an edited question or a new answer is a branch beside the old one. The
// path from the root to `leaf` is what is shown and sent.

import { newId } from "./dom.js";

export const VERSION = 1;
export const TOO_LONG = "context_length_exceeded"; // the server's code for messages that leave no room
const TITLE_LENGTH = 60;
const ANSWER_ROOM = 4096; // most tokens that are kept free for an answer whose length is not limited
const ANSWER_SHARE = 4; // at most one in so many tokens of the context is kept free for the answer
const TOKENS_PER_CHARACTER = 1 / 3; // before an answer has told

/** Return an empty conversation. */
export function newConversation(settings) {
  const now = Date.now();
  return { version: VERSION, id: newId(), title: "", created: now, updated: now, settings, nodes: {}, roots: [], leaf: null };
}

/** Add a message after `parent` (null: the first one) and make it the leaf. */
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, children: [], created: Date.now(), content: "", ...fields };
  conversation.nodes[node.id] = node;
  childrenOf(conversation, parent).push(node.id);
  conversation.leaf = node.id;
  conversation.updated = node.created;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

function childrenOf(conversation, id) {
  return id === null ? conversation.roots : conversation.nodes[id].children;
}

/** Return a title for a first message. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/^[#>*\s]+/, "").trim();
  const characters = [...line];
  return characters.length <= TITLE_LENGTH ? line || "New chat" : `${characters.slice(0, TITLE_LENGTH - 1).join("").trimEnd()}…`;
}

/** Return the messages from the first one to a message; by default to the leaf. */
export function pathOf(conversation, to = conversation.leaf) {
  const path = [];
  for (let id = to; id !== null; id = conversation.nodes[id].parent) path.unshift(conversation.nodes[id]);
  return path;
}

/** Return the messages that are alternatives to one, in the order in which they were made. */
export function alternatives(conversation, node) {
  return childrenOf(conversation, node.parent).map((id) => conversation.nodes[id]);
}

/** Show the branch of a message, down to its newest end. */
export function chooseBranch(conversation, id) {
  let node = conversation.nodes[id];
  while (node.children.length) node = conversation.nodes[node.children.at(-1)];
  conversation.leaf = node.id;
}

/** Return the messages of a request: the system prompt, and the turns up to `to` but the oldest. */
export function requestMessages(conversation, to, leftOut = 0) {
  const system = conversation.settings.system?.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  return [...messages, ...turnsOf(conversation, to).slice(leftOut).flat()];
}

/** Return the messages up to `to` as a list of turns: a question, and all that follows until the next one. */
export function turnsOf(conversation, to) {
  const turns = [];
  const path = pathOf(conversation, to);
  path.forEach((node, index) => {
    if (node.role === "user" || !turns.length) turns.push([]);
    const turn = turns.at(-1);
    if (node.role === "tool") {
      turn.push({ role: "tool", tool_call_id: node.callId, content: node.content });
    } else if (node.role === "user") {
      if (!isTooLong(path[index + 1])) turn.push({ role: "user", content: node.content });
    } else if (node.content || node.calls?.length) {
      turn.push(assistantMessage(node)); // else it failed, or was stopped at once
    }
  });
  return turns.filter((turn) => turn.length);
}

/** Return whether an answer never began because its question alone takes more than the context. */
function isTooLong(node) {
  return node?.error?.code === TOO_LONG && !node.content;
}

/**
 * Return how many of the oldest turns a request leaves out so that its answer has room, all in tokens.
 *
 * The last answer tells how many tokens its messages were. The server has the last word: it refuses
 * a request that is too long, and then more is left out.
 */
export function turnsToLeaveOut(conversation, to, context, longestAnswer) {
  const room = Math.min(longestAnswer ?? ANSWER_ROOM, Math.floor(context / ANSWER_SHARE));
  const last = pathOf(conversation, to).findLast(({ stats }) => stats?.prompt && stats.sent);
  const rate = last ? last.stats.prompt / last.stats.sent : TOKENS_PER_CHARACTER;
  const turns = turnsOf(conversation, to).map((turn) => JSON.stringify(turn).length);
  let length = lengthOf(conversation, requestMessages(conversation, to));
  let leftOut = 0;
  while (leftOut < turns.length - 1 && rate * length + room > context) length -= turns[leftOut++];
  return leftOut;
}

/** Return the characters of a request's messages and tools. */
export function lengthOf(conversation, messages) {
  return JSON.stringify(messages).length + (conversation.settings.tools ?? "").length;
}

function assistantMessage(node) {
  const message = { role: "assistant", content: node.content };
  if (!node.calls?.length) return message;
  message.tool_calls = node.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  // Templates show the thought before a call until the user speaks again.
  if (node.thought) message.reasoning_content = node.thought;
  return message;
}

/** Return a conversation's shown path as Markdown. */
export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Chat"}`];
  if (conversation.settings.system) parts.push(`> System: ${conversation.settings.system.replaceAll("\n", "\n> ")}`);
  for (const node of pathOf(conversation)) {
    const speaker = { user: "You", tool: "Tool" }[node.role] ?? node.model ?? "Assistant";
    parts.push(`## ${speaker}`);
    if (node.content) parts.push(node.content);
    for (const call of node.calls ?? []) parts.push(`\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``);
  }
  return parts.join("\n\n") + "\n";
}

/** Return the conversations of an exported file, with new ids; throw an Error that says what is wrong. */
export function readExport(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const found = Array.isArray(data?.conversations) ? data.conversations : [data];
  return found.map((conversation, index) => checked(conversation, index));
}

const ROLES = new Set(["user", "assistant", "tool"]);

function checked(given, index) {
  const wrong = (what) => new Error(`Conversation ${index + 1} of the file cannot be read: ${what}.`);
  if (typeof given !== "object" || given === null || typeof given.nodes !== "object" || given.nodes === null) {
    throw wrong("it has no messages");
  }
  if (given.version !== VERSION) throw wrong(`its version is ${given.version}, not ${VERSION}`);
  const made = newConversation(plainSettings(given.settings));
  made.title = text(given.title).slice(0, 200) || "Imported chat";
  if (Number.isFinite(given.created)) made.created = given.created;
  if (Number.isFinite(given.updated)) made.updated = given.updated;
  const { updated } = made;
  const places = new Map(); // old ids to new ones
  const waiting = Array.isArray(given.roots) ? given.roots.map((id) => [id, null]) : [];
  let leaf = null;
  for (let at = 0; at < waiting.length; at += 1) {
    const [id, parent] = waiting[at];
    const node = Object.hasOwn(given.nodes, id) ? given.nodes[id] : null;
    if (!node || !ROLES.has(node.role) || places.has(id)) throw wrong(`its message ${at + 1} is broken`);
    const added = addNode(made, parent, plainNode(node));
    places.set(id, added.id);
    if (id === given.leaf) leaf = added.id;
    for (const child of Array.isArray(node.children) ? node.children : []) waiting.push([child, added.id]);
  }
  if (leaf !== null) made.leaf = leaf;
  else if (made.roots.length) chooseBranch(made, made.roots.at(-1));
  made.updated = updated;
  return made;
}

const text = (value) => (typeof value === "string" ? value : "");

function plainNode(node) {
  const calls = Array.isArray(node.calls) ? node.calls : [];
  return {
    role: node.role,
    content: text(node.content),
    thought: text(node.thought),
    model: text(node.model),
    finish: text(node.finish),
    callId: text(node.callId),
    calls: calls.map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
  };
}

function plainSettings(settings) {
  const kept = {};
  for (const [name, value] of Object.entries(typeof settings === "object" && settings !== null ? settings : {})) {
    if (typeof value === "string" || typeof value === "number") kept[name] = value;
  }
  return kept;
}
