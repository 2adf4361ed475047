// The gateway's API, as far as the page needs it.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
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

/** Send this API key from now on; none if it is empty. */
export function useKey(value) {
  key = value.trim();
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

const AWAY = "The gateway cannot be reached. Is it running?";

async function ask(path, options) {
  let response;
  try {
    const headers = { ...options?.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(AWAY);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? body?.reasons?.join(", ") ?? `The gateway answered ${response.status}.`;
  throw new ApiError(words, response.status);
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
 * Ask for an answer.
 * @returns {Promise<{requestId: string, chunks: AsyncGenerator<object>}>}
 */
export async function chat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  return { requestId: response.headers.get("X-Request-Id") ?? "", chunks: events(response) };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The answer was cut off: the connection to the gateway ended.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The answer was cut off: the connection to the gateway broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
