// One answer while it comes: the request, and what its chunks add to a message.

import { ApiError, streamChat } from "./api.js";
import { lengthOf, requestMessages, TOO_LONG, turnsOf } from "./conversation.js";

const LEFT_OUT_SHARE = 4; // of the turns that were too long, one in so many is left out next

/**
 * Runs one request and writes the answer into a node; `changed` is called after each change.
 *
 * The request has the messages up to the node `to` without the oldest `node.leftOut` turns, and the
 * other fields of `body`.
 */
export class Answer {
  constructor(conversation, node, to, body, changed) {
    this.conversation = conversation;
    this.node = node;
    this.to = to;
    this.body = body;
    this.changed = changed;
    this.abort = new AbortController();
    this.usage = null;
  }

  /** End the answer; what has come stays. */
  stop() {
    this.abort.abort();
  }

  /** Run to the end, whatever the end is; the node says what it was. */
  async run() {
    const { node } = this;
    node.error = undefined;
    node.finish = "";
    node.stats = {};
    node.waiting = "";
    this.started = performance.now();
    this.firstAt = null;
    this.tokens = 0;
    try {
      await this.request();
    } catch (error) {
      if (error.name === "AbortError") {
        node.finish = "stopped";
      } else {
        const known = error instanceof ApiError;
        node.error = { message: error.message, code: known ? error.code : "", status: known ? error.status : -1, temporary: known && error.isTemporary };
      }
    }
    if (node.stats.generated === undefined && this.tokens) node.stats.generated = this.tokens;
    delete node.waiting;
    this.changed();
  }

  /** Send the request; while it is too long for the context, leave out more of its oldest turns. */
  async request() {
    const { node, conversation } = this;
    for (;;) {
      const messages = requestMessages(conversation, this.to, node.leftOut);
      node.stats.sent = lengthOf(conversation, messages);
      try {
        for await (const chunk of streamChat({ ...this.body, messages }, this.abort.signal)) this.take(chunk);
        return;
      } catch (error) {
        const others = turnsOf(conversation, this.to).length - 1 - node.leftOut;
        if (error.code !== TOO_LONG || others < 1) throw error;
        node.leftOut += Math.ceil(others / LEFT_OUT_SHARE);
      }
    }
  }

  take(chunk) {
    const { node } = this;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.countToken();
    if (delta.reasoning_content) node.thought = (node.thought ?? "") + delta.reasoning_content;
    if (delta.content || delta.tool_calls) this.endThought();
    if (delta.content) node.content += delta.content;
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (choice?.finish_reason) node.finish = choice.finish_reason;
    if (chunk.usage) this.takeUsage(chunk);
    this.changed();
  }

  countToken() {
    const now = performance.now();
    this.tokens += 1;
    if (this.firstAt === null) {
      this.firstAt = now;
      this.node.stats.first_s = (now - this.started) / 1000;
    } else if (now - this.firstAt > 250) {
      this.node.stats.rate = (this.tokens - 1) / ((now - this.firstAt) / 1000);
    }
  }

  endThought() {
    const { node } = this;
    if (node.thought && node.stats.thought_s === undefined) node.stats.thought_s = (performance.now() - this.firstAt) / 1000;
  }

  takeCall(part) {
    const calls = (this.node.calls ??= []);
    const call = (calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name += part.function.name;
    if (part.function?.arguments) call.arguments += part.function.arguments;
  }

  /** The server's own numbers replace those that the page has counted. */
  takeUsage({ usage, timings }) {
    const { stats } = this.node;
    this.usage = usage;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    stats.generated = usage.completion_tokens;
    stats.thought_tokens = usage.completion_tokens_details?.reasoning_tokens ?? 0;
    if (timings?.decode_tokens_per_second) stats.rate = timings.decode_tokens_per_second;
    stats.hit_rate = timings?.experts?.hit_rate ?? undefined;
    stats.guessed = timings?.draft_tokens ?? 0;
    stats.accepted = timings?.draft_tokens_accepted ?? 0;
  }
}
