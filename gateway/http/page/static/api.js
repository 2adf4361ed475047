// The gateway's API, as far as the page needs it.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let key = ""; // kept as long as the page, and nowhere else

/** Send this API key from now on; none if it is empty. */
export function useKey(value) {
  key = value.trim();
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
  const told = await response.json().catch(() => null);
  const words = told?.error?.message ?? told?.reasons?.join(", ") ?? `The gateway answered ${response.status}.`;
  throw new ApiError(words, response.status);
}

/** The model that is served: `{id, voices}`. */
export async function servedModel() {
  const list = await (await ask("/v1/models")).json();
  return list.data[0];
}

/** Throws in words why the stack cannot serve. */
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
      if (done) throw new ApiError("The answer broke off.");
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
    throw new ApiError("The connection to the gateway broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
