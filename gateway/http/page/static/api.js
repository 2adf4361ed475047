// The gateway's API, as far as the page needs it.

export class ApiError extends Error {
  /**
   * @param {number} status of the response; 0 without one
   * @param {string} code the gateway's code of the error
   * @param {boolean} lost there is no connection to the gateway any more
   */
  constructor(message, { status = 0, code = "", lost = false } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.lost = lost;
  }

  /** Whether the gateway ended, or ends, before its answer: another request may go on with it. */
  get interrupted() {
    return this.lost || ["stopping", "cancelled"].includes(this.code);
  }

  /** Whether the gateway, which may have just started, cannot take the request yet. */
  get temporary() {
    return [429, 502, 503, 504].includes(this.status) || ["busy", "stage_unavailable"].includes(this.code);
  }

  /** Whether the same request may succeed later: the connection, the load or a key was at fault, not the request. */
  get retryable() {
    return ![400, 404, 413, 415, 422].includes(this.status);
  }

  /** Whether an API key is missing or wrong. */
  get keyRejected() {
    return this.status === 401 || this.status === 403;
  }
}

const KEY_NAME = "omnirelay-api-key";
let key = sessionStorage.getItem(KEY_NAME) ?? ""; // survives a reload, ends with the tab

/** Send this API key from now on, without signs that no header may have, as invisible ones; none if it is empty. */
export function useKey(value) {
  key = value.replace(/[^!-~]/g, "");
}

/** The key that is sent. */
export function usedKey() {
  return key;
}

/** Keep an accepted key until the tab is closed. */
export function keepKey() {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

let gateways = [location.origin]; // the one in use first

/** The origin of the gateway in use. */
export function gateway() {
  return gateways[0];
}

/** All origins, the one in use first. */
export function origins() {
  return gateways;
}

/** Learn where the other gateways are. */
export async function findGateways() {
  const known = await (await ask("/page/gateways.json")).json();
  const own = known.indexOf(location.origin);
  if (own >= 0) gateways = [...known.slice(own), ...known.slice(0, own)];
  else gateways = [location.origin, ...known];
}

/** Use the next gateway from now on, if this one is still in use. */
function leave(origin) {
  if (gateways[0] === origin) gateways.push(gateways.shift());
}

const SILENT_MS = 20000; // the gateway sends something every 15 s
const AWAY = "The gateway cannot be reached. Is it running?";

async function ask(path, options) {
  let origin;
  let response;
  for (let left = gateways.length; response === undefined; left--) {
    origin = gateway();
    try {
      const headers = { ...options?.headers, ...(key && { Authorization: `Bearer ${key}` }) };
      const signal = options?.signal ?? AbortSignal.timeout(SILENT_MS);
      response = await fetch(new URL(path, origin), { ...options, headers, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      leave(origin);
      if (left === 1) throw new ApiError(AWAY, { lost: true });
    }
  }
  if (response.ok) return response;
  if (response.status === 503) leave(origin);
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? body?.reasons?.join(", ") ?? `The gateway answered ${response.status}.`;
  throw new ApiError(words, { status: response.status, code: body?.error?.code });
}

/** The model that is served: `{id, voices, limits}`. */
export async function servedModel() {
  const list = await (await ask("/v1/models")).json();
  return list.data[0];
}

/** Throws an `ApiError` that says why the stack cannot serve. */
export async function requireReady() {
  await ask("/readyz");
}

/**
 * Begin a call by WebRTC.
 * @returns {Promise<string>} the SDP answer
 */
export async function beginCall(offer, session) {
  const body = new FormData();
  body.set("sdp", offer);
  body.set("session", JSON.stringify(session));
  return (await ask("/v1/realtime/calls", { method: "POST", body })).text();
}

/**
 * Ask for an answer.
 * @returns {Promise<{requestId: string, chunks: AsyncGenerator<object>}>}
 */
export async function chat(body, signal) {
  const response = await post("/v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  return { requestId: response.headers.get("X-Request-Id") ?? "", chunks: events(response) };
}

/**
 * Have a text read aloud.
 * @returns {AsyncGenerator<object>} events whose `audio` is base64 of 16-bit samples
 */
export async function* speech(body, signal) {
  const response = await post("/v1/audio/speech", { ...body, response_format: "pcm", stream_format: "sse" }, signal);
  for await (const event of events(response)) {
    if (event.type === "speech.audio.done") return;
    yield event;
  }
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function* events(response) {
  const { origin } = new URL(response.url);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await inTime(reader.read());
      if (done) throw new ApiError("The answer was cut off: the connection to the gateway ended.", { lost: true });
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
        yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const cut = "The answer was cut off: the connection to the gateway broke.";
    const told = error instanceof ApiError ? error : new ApiError(cut, { lost: true });
    if (told.lost) leave(origin);
    throw told;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What is read, unless the gateway is silent for too long. */
function inTime(reading) {
  let timer;
  const silence = new Promise((_, reject) => {
    const error = new ApiError("The answer was cut off: the gateway is silent.", { lost: true });
    timer = setTimeout(() => reject(error), SILENT_MS);
  });
  return Promise.race([reading, silence]).finally(() => clearTimeout(timer));
}
