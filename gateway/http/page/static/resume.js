// An answer that outlives its gateway: what has arrived of it is sent with the question again.

import { ApiError, chat } from "./api.js";

const PATIENCE_MS = 60000; // without anything new for so long, the answer is given up
const FIRST_PAUSE_MS = 200;
const MAX_PAUSE_MS = 2000;

/**
 * Ask for an answer, and go on with it if the gateway is lost or stops.
 * @param {(requestId: string) => void} accepted called for each request
 * @returns {AsyncGenerator<object>} the chunks
 */
export async function* answer(body, signal, accepted) {
  const held = {};
  let interrupted = null; // since when nothing new has come
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const { requestId, chunks } = await chat(continued(body, held), signal);
      accepted(requestId);
      for await (const chunk of chunks) {
        if (chunk.resume) {
          add(held, chunk.resume);
          interrupted = null;
          pause = FIRST_PAUSE_MS;
        }
        yield chunk;
      }
      return;
    } catch (error) {
      const resumable = error instanceof ApiError && held.request_id !== undefined;
      if (!resumable || !(error.interrupted || (interrupted !== null && error.temporary))) throw error;
      interrupted ??= performance.now();
      if (performance.now() + pause > interrupted + PATIENCE_MS) throw error;
      await sleep(pause, signal);
      pause = Math.min(2 * pause, MAX_PAUSE_MS);
    }
  }
}

/** The body of the next request, behind what is held of the answer. */
function continued(body, { seed, ...partial }) {
  const next = { ...body, resumable: true };
  return partial.request_id === undefined ? next : { ...next, seed, resume: partial };
}

function add(held, told) {
  for (const [name, value] of Object.entries(told)) {
    if (Array.isArray(value)) (held[name] ??= []).push(...value);
    else held[name] = value;
  }
}

function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
    if (signal.aborted) stop();
  });
}
