// A realtime session by WebSocket that outlives its connection, and its gateway.

import { ApiError, origins, usedKey } from "./api.js";

const PATIENCE_MS = 60000; // without a connection for so long, the conversation ends
const OPEN_MS = 5000;
const FIRST_PAUSE_MS = 200;
const MAX_PAUSE_MS = 2000;
const SILENT_MS = 4000; // a gateway that says nothing for so long is asked, and given up after as long again
const PROBE = { type: "conversation.item.retrieve", event_id: "probe", item_id: "none" }; // answered by an error
const KEPT = 1200; // last events that may have to be sent again: two minutes of sound
const LEAD = 10; // events before the gateway notices speech: a second of sound
const OVER = [1000, 1008]; // the gateway ended the session on purpose
const ANSWERED = ["completed", "incomplete"]; // states of a response; a gateway that stops lets them fail
const LOST = 4000; // a close code that does not end the session

export class SessionSocket {
  #socket = null;
  #origin = origins()[0];
  #settings;
  #onEvent;
  #history;
  #resume = {}; // how to get the session again
  #sent = []; // the last events
  #count = 0; // of all events that were sent in this session
  #question = null; // at which event what has no answer yet began to be said
  #asked = false; // it has been said to its end
  #heard = 0; // when the gateway last said something
  #probed = false; // it was asked since
  #timer = 0;
  #closed = false;

  /**
   * @param {object} settings of the session
   * @param {(event: object) => void} onEvent called with the gateway's events, and `{type: "lost"}` when the connection
   *     is; then `{type: "back"}` if the session goes on, `{type: "renewed", again}` if another begins, with `again` if
   *     the last question is asked again; the last event is `{type: "closed"}`
   * @param {() => object[]} history the items with which another session begins
   */
  constructor(settings, onEvent, history) {
    this.#settings = settings;
    this.#onEvent = onEvent;
    this.#history = history;
  }

  /** Throws an `ApiError` if the gateway takes no sessions now. */
  async open() {
    await this.#connect(this.#origin);
    this.send({ type: "session.update", session: this.#settings });
    this.#timer = setInterval(() => this.#watch(), 1000);
  }

  /** Send an event, now or when there is a connection again. */
  send(event) {
    this.#count++;
    this.#sent.push(event);
    if (this.#sent.length > KEPT) this.#sent.shift();
    // While it closes it takes nothing, and the browser would complain.
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  close() {
    this.#closed = true;
    clearInterval(this.#timer);
    this.#socket?.close();
  }

  async #connect(origin) {
    const url = new URL("/v1/realtime", origin);
    url.protocol = url.protocol.replace("http", "ws");
    const { id, secret, after } = this.#resume;
    const session = id ? { session_id: id, starting_after: after } : { resume: true };
    url.search = new URLSearchParams({ model: "omnirelay", ...session });
    const key = usedKey();
    const protocols = ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])];
    if (id) protocols.push(`omnirelay-resume-secret.${secret}`);
    const socket = new WebSocket(url, protocols);
    const event = await first(socket);
    this.#socket = socket;
    this.#origin = origin;
    socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    socket.onclose = ({ code }) => this.#lose(OVER.includes(code));
    this.#begin(event);
  }

  /** A session's first event says whether it goes on, or is another. */
  #begin(event) {
    this.#hear();
    if (event.type === "session.resumed") {
      for (const each of this.#last(this.#count - event.received_events)) this.#socket.send(JSON.stringify(each));
      this.#onEvent({ type: "back" });
    } else if (this.#count) {
      this.#renew(event);
    } else {
      this.#take(event);
    }
  }

  #renew(event) {
    const again = this.#question === null ? [] : this.#last(this.#count - this.#question);
    this.#sent = [];
    this.#count = 0;
    this.#question = null;
    this.#take(event);
    this.#onEvent({ type: "renewed", again: again.length > 0 });
    this.send({ type: "session.update", session: this.#settings });
    for (const item of this.#history()) this.send({ type: "conversation.item.create", item });
    for (const each of again) if (each.type.startsWith("input_")) this.send(each);
  }

  #last(number) {
    return number > 0 ? this.#sent.slice(-number) : [];
  }

  #take(event) {
    this.#hear();
    if (event.sequence_number !== undefined) this.#resume.after = event.sequence_number;
    switch (event.type) {
      case "session.created":
        this.#resume = { id: event.resume && event.session.id, secret: event.resume?.secret, after: event.sequence_number };
        return;
      case "input_audio_buffer.speech_started":
        this.#question = Math.max(0, this.#count - LEAD);
        this.#asked = false;
        break;
      case "input_audio_buffer.committed":
        this.#asked = true;
        break;
      case "response.done":
        if (this.#asked && ANSWERED.includes(event.response.status)) this.#question = null;
        break;
      case "error":
        if (event.error.code === "session_not_resumed" || event.error.event_id === PROBE.event_id) return;
    }
    this.#onEvent(event);
  }

  #hear() {
    this.#heard = performance.now();
    this.#probed = false;
  }

  /** A network that is gone closes no connection. */
  #watch() {
    if (!this.#socket || performance.now() < this.#heard + SILENT_MS) return;
    if (this.#probed) {
      this.#lose(false);
      return;
    }
    this.#hear();
    this.#probed = true;
    this.send(PROBE);
  }

  #lose(over) {
    const socket = this.#socket;
    this.#socket = socket.onclose = socket.onmessage = null;
    socket.close(LOST);
    if (this.#closed) return;
    if (over) this.#end();
    else this.#reconnect();
  }

  async #reconnect() {
    this.#onEvent({ type: "lost" });
    const until = performance.now() + PATIENCE_MS;
    for (let pause = FIRST_PAUSE_MS; performance.now() < until; pause = Math.min(2 * pause, MAX_PAUSE_MS)) {
      for (const origin of new Set([this.#origin, ...origins()])) {
        try {
          await this.#connect(origin);
          if (this.#closed) this.#socket.close();
          return;
        } catch (error) {
          if (!(error instanceof ApiError)) throw error;
        }
        if (this.#closed) return;
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
    this.#end();
  }

  #end() {
    if (this.#closed) return;
    this.close();
    this.#onEvent({ type: "closed" });
  }
}

/** A connection's first event. */
function first(socket) {
  return new Promise((resolve, reject) => {
    const fail = () => {
      clearTimeout(timer);
      socket.onclose = socket.onmessage = null;
      socket.close(LOST);
      reject(new ApiError("The gateway takes no conversations now.", { lost: true }));
    };
    const timer = setTimeout(fail, OPEN_MS);
    socket.onclose = fail;
    socket.onmessage = ({ data }) => {
      clearTimeout(timer);
      resolve(JSON.parse(data));
    };
  });
}
