// Requests to the server that the page came from, with the API key where the server wants one.

const KEY = "headroom.key"; // of the session's storage: it is gone when the tab is closed
const RETRY_S = 2; // where an error says "later" without a time

/** An answer of the server that is no success, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(status, message, { code = "", retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds; null: trying again changes nothing
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return this.status === 0 || this.status === 503 || this.status === 429;
  }
}

/** What asks the person for a key; returns null if there will be none. The page sets it. */
let askKey = async () => null;
let asking = null; // one question for all requests that wait for its answer

export function setKeyQuestion(question) {
  askKey = question;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

let key = storedKey();

function keepKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // The key holds until the page is left.
  }
}

async function send(path, options, signal) {
  const headers = { ...(options.body === undefined ? {} : { "Content-Type": "application/json" }) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = options.body === undefined ? undefined : JSON.stringify(options.body);
  try {
    return await fetch(path, { method: options.method ?? "GET", headers, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.", { code: "unreachable", retryAfter: RETRY_S });
  }
}

/** Return the response to a request; every other end is an ApiError. */
async function request(path, options = {}, signal = undefined) {
  for (;;) {
    const used = key;
    const response = await send(path, options, signal);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (used === key) {
      asking ??= askKey(used ? error.message : "").finally(() => (asking = null));
      const given = await asking;
      if (given === null) throw error;
      keepKey(given);
    }
  }
}

async function errorOf(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // Not JSON, for example of a proxy in between.
  }
  const later = response.headers.get("Retry-After");
  return new ApiError(response.status, told.message || `The server answered with status ${response.status}.`, {
    code: told.code ?? "",
    retryAfter: later === null ? null : Number(later) || RETRY_S,
  });
}

export async function getJson(path, signal) {
  return (await request(path, {}, signal)).json();
}

export async function postJson(path, body, signal) {
  return (await request(path, { method: "POST", body }, signal)).json();
}

/** Yield the chunks of a streamed chat completion. */
export async function* streamChat(body, signal) {
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("/v1/chat/completions", { method: "POST", body: sent }, signal);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        const { message, code } = chunk.error;
        const later = ["capacity_exceeded", "cancelled", "shutting_down"].includes(code);
        throw new ApiError(later ? 503 : 500, message, { code, retryAfter: later ? RETRY_S : null });
      }
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw lost();
  }
  throw lost();
}

function lost() {
  return new ApiError(0, "The connection to the server was lost.", { code: "connection_lost", retryAfter: RETRY_S });
}

/** Yield the data of server-sent events; comments are skipped. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.trim() === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
