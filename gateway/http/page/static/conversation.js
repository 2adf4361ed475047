// The exchanges of a conversation: what was asked, what came back, and what of it the model is sent again.

import { ApiError, speech } from "./api.js";
import { Attachment, FileBudget, FileError } from "./files.js";
import { PcmReader } from "./pcm.js";
import { silence } from "./player.js";
import { answer } from "./resume.js";
import { AnswerTurn, userTurn } from "./turns.js";

const STALL_MS = 1500; // without anything new for so long, the stack is asked what is wrong
const CUT_OFF = "The page was closed before the answer was complete.";

export class Conversation {
  #exchanges = [];
  #store = null;
  #abort = null;
  #last = Promise.resolve(); // the end of the last answer

  /**
   * @param {Element} element where the turns are shown
   * @param {object} page `voice()`: none for text alone; `model()`; `instructions()`: may be empty; `draft(words, files)`: put them in the message
   *     field; `why()`: asks why the stack does not serve, if it does not; `changed()`, `announce(words)`, `follow()`
   */
  constructor(element, page) {
    this.element = element;
    this.page = page;
  }

  /** Whether an answer is being received. */
  get answering() {
    return this.#abort !== null;
  }

  /** Show what the browser kept, and keep what follows. */
  async restore(store) {
    this.#store = store;
    await this.#load();
  }

  async #load() {
    for (const saved of (await this.#store?.load()) ?? []) {
      const exchange = this.#add(saved.order, saved.words, saved.files.map((file) => new Attachment(file)));
      const answer = saved.answer ?? { state: "failed", text: "", samples: new Int16Array(0), message: CUT_OFF };
      this.#place(exchange, AnswerTurn.restored(answer, ...this.#calls(exchange), this.#retry(exchange, answer.state)));
    }
  }

  /**
   * Ask a question.
   * @throws {FileError} its files are more than the gateway takes; nothing was sent
   */
  async ask(words, files) {
    new FileBudget(this.page.model()?.limits).require(files);
    this.stop();
    const exchange = this.#add((this.#exchanges.at(-1)?.order ?? -1) + 1, words, files);
    await this.#store?.save(this.#record(exchange));
    await this.#answer(exchange);
  }

  /** End the answer that is received, and its sound. */
  stop() {
    this.#abort?.abort();
    silence();
  }

  /** Show another conversation: one that the browser keeps, or a new one. */
  async open(id = null) {
    this.stop();
    await this.#last.catch(() => {});
    for (const exchange of this.#exchanges.splice(0)) remove(exchange);
    if (id === null) this.#store?.begin();
    else this.#store?.select(id);
    await this.#load();
  }

  #add(order, words, files) {
    const exchange = { order, words, files, question: userTurn(words, files), turn: null };
    this.#exchanges.push(exchange);
    this.element.append(exchange.question);
    return exchange;
  }

  #place(exchange, turn) {
    exchange.question.after(turn.element);
    exchange.turn?.release();
    exchange.turn = turn;
  }

  async #answer(exchange) {
    await this.#next(() => this.#receive(exchange));
  }

  /** Begin when all that was begun before has ended. */
  async #next(work) {
    this.#last = this.#last.catch(() => {}).then(work);
    await this.#last;
  }

  /** What an answer calls: when its sound begins or ends, and to be read aloud. */
  #calls(exchange) {
    const read = () => {
      this.stop();
      this.#next(() => this.#read(exchange));
    };
    return [this.page.changed, read];
  }

  async #read(exchange) {
    const { signal } = (this.#abort = new AbortController());
    const voice = this.page.voice();
    this.page.changed();
    try {
      const body = { model: this.#model, ...(voice && { voice }) };
      await exchange.turn.read((input) => speech({ ...body, input }, signal));
      await this.#store?.save(this.#record(exchange));
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
    } finally {
      this.#abort = null;
      this.page.changed();
    }
  }

  get #model() {
    return this.page.model()?.id ?? "omnirelay";
  }

  async #receive(exchange) {
    const voice = this.page.voice();
    this.#abort = new AbortController();
    const turn = new AnswerTurn(voice !== null, ...this.#calls(exchange));
    this.#place(exchange, turn);
    this.page.changed();
    this.page.follow(true);
    const stall = this.#watch(turn);
    try {
      await this.#stream(exchange, turn, voice, stall);
      turn.end("done");
      this.page.announce(turn.text);
    } catch (error) {
      this.#failed(exchange, turn, error);
    } finally {
      clearInterval(stall.timer);
      await this.#store?.save(this.#record(exchange));
      this.#abort = null;
      this.page.changed();
      this.page.follow();
    }
  }

  async #stream(exchange, turn, voice, stall) {
    const { signal } = this.#abort;
    const body = { model: this.#model, messages: await this.#messages(exchange), modalities: ["text"] };
    if (voice !== null) {
      body.modalities.push("audio");
      body.audio = { format: "pcm16", ...(voice && { voice }) };
    }
    signal.throwIfAborted();
    const accepted = (requestId) => (turn.element.dataset.request = requestId);
    const reader = new PcmReader();
    for await (const { choices } of answer(body, signal, accepted)) {
      stall.heard();
      const delta = choices[0]?.delta ?? {};
      const words = delta.content ?? delta.audio?.transcript;
      if (words) turn.addText(words);
      if (delta.audio?.data) turn.addSamples(reader.read(delta.audio.data), delta.audio.start_delay_ms);
      this.page.follow();
    }
  }

  #failed(exchange, turn, error) {
    if (error.name === "AbortError") {
      turn.end("stopped", "", this.#retry(exchange, "stopped"));
      this.page.announce("Stopped.");
      return;
    }
    if (!(error instanceof ApiError || error instanceof FileError)) throw error;
    exchange.message = error.message;
    turn.end("failed", error.message, error.retryable ? this.#retry(exchange, "failed") : this.#edit(exchange));
    this.page.why();
  }

  /** While nothing comes, say why. */
  #watch(turn) {
    let last = performance.now();
    const ask = async () => {
      const since = last;
      if (performance.now() - since <= STALL_MS) return;
      const words = await this.page.why();
      if (last === since) turn.status(words);
    };
    const heard = () => {
      last = performance.now();
      turn.status("");
    };
    return { heard, timer: setInterval(ask, 1000) };
  }

  #retry(exchange, state) {
    return state === "done" ? null : { label: "Try again", run: () => this.#again(exchange) };
  }

  /** Answer in the old answer's place, knowing what was said before it. */
  async #again(exchange) {
    this.stop();
    exchange.message = "";
    await this.#answer(exchange);
  }

  #edit(exchange) {
    const run = () => {
      this.#exchanges.splice(this.#exchanges.indexOf(exchange), 1);
      remove(exchange, false);
      this.#store?.delete(exchange.order);
      this.page.draft(exchange.words, exchange.files);
    };
    return { label: "Edit the question", run };
  }

  /** A question after the exchanges before it; their oldest files are left out where the gateway would take no more. */
  async #messages(exchange) {
    const budget = new FileBudget(this.page.model()?.limits);
    budget.require(exchange.files);
    const earlier = this.#exchanges.slice(0, this.#exchanges.indexOf(exchange)).filter(({ turn }) => turn.text);
    const kept = new Set(earlier.flatMap(({ files }) => files).reverse().filter((file) => budget.take(file)));
    const instructions = this.page.instructions();
    const messages = instructions ? [{ role: "system", content: instructions }] : [];
    for (const { words, files, turn } of earlier) {
      messages.push(await question(words || "(a file that is not sent again)", files.filter((file) => kept.has(file)), words));
      messages.push({ role: "assistant", content: turn.text });
    }
    return [...messages, await question(exchange.words, exchange.files, exchange.words)];
  }

  #record({ order, words, files, turn, message }) {
    const record = { order, words, files: files.map(({ file }) => file), answer: null };
    const state = turn?.element.dataset.state;
    if (state) record.answer = { state, text: turn.text, samples: turn.samples, message: message ?? "" };
    return record;
  }
}

async function question(fallback, files, words) {
  const parts = await Promise.all(files.map((each) => each.part()));
  if (words || !parts.length) parts.push({ type: "text", text: words || fallback });
  return { role: "user", content: parts };
}

function remove({ question, turn, files }, release = true) {
  question.remove();
  turn?.release();
  if (release) for (const each of files) each.release();
}
