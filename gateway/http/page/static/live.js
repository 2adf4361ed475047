// The conversation button: an open microphone, which interrupts answers.

import { ApiError } from "./api.js";
import { Camera } from "./camera.js";
import { openLink } from "./links.js";
import { Level, openMicrophone, RecorderError } from "./recorder.js";
import { AnswerTurn, userTurn } from "./turns.js";

const NOTE_MS = 250;
const byId = (id) => document.getElementById(id);

export class Live {
  #button = byId("live");
  #camera;
  #level = null;
  #microphone = null;
  #asking = false; // the browser asks the user for the microphone
  #link = null;
  #questions = new Map(); // by item, in order
  #item = null; // the last one's
  #before = ""; // the state when the connection was lost
  #answers = [];
  #answer = null; // the last one
  #timer = 0;

  /**
   * @param {{turns: HTMLElement, voice: () => string, instructions: () => string, calls: () => boolean, begin: () => void, changed: () => void,
   *     notice: (words: string) => void, follow: () => void}} page
   */
  constructor(page) {
    this.page = page;
    this.#button.onclick = () => this.begin();
    byId("live-end").onclick = () => this.end();
    this.#camera = new Camera({ send: (event) => this.#link?.send(event), notice: page.notice });
  }

  /** The microphone is open, or is about to be. */
  get active() {
    return this.#microphone !== null;
  }

  async begin() {
    if (this.#asking) return;
    this.page.begin();
    try {
      this.#asking = true;
      this.#microphone = await openMicrophone().finally(() => (this.#asking = false));
      this.#microphone.getTracks()[0].onended = () => {
        this.end();
        this.page.notice("The microphone is gone: the conversation has ended.");
      };
      this.#level = new Level(this.#microphone);
      this.#show();
      this.#say("Connecting …");
      this.#level.show(byId("live-level"));
      byId("live-end").focus();
      const microphone = this.#microphone;
      const link = await openLink(microphone, this.#session(), this.page.calls(), (event) => this.#take(event), () => this.#history());
      // It may have been ended meanwhile.
      if (this.#microphone !== microphone) {
        link.close();
        return;
      }
      this.#link = link;
      this.#button.dataset.link = link.kind;
      this.#say("Listening");
      this.#note();
    } catch (error) {
      this.end();
      if (!(error instanceof RecorderError || error instanceof ApiError)) throw error;
      this.page.notice(error.message);
    }
  }

  end() {
    clearTimeout(this.#timer);
    for (const track of this.#microphone?.getTracks() ?? []) track.stop();
    this.#level?.close();
    this.#camera.end();
    this.#link?.close();
    this.#answer?.turn.cut();
    this.#finish("stopped");
    this.#microphone = this.#link = this.#level = null;
    this.#show();
    this.page.changed();
  }

  /** Take what was said off the page: the browser does not keep it. */
  clear() {
    for (const question of this.#questions.values()) question.remove();
    for (const { turn } of this.#answers) turn.release();
    this.#questions.clear();
    this.#answers = [];
    this.#answer = null;
  }

  #session() {
    const input = { turn_detection: { type: "server_vad" }, transcription: {} };
    const output = this.page.voice() ? { voice: this.page.voice() } : {};
    const instructions = this.page.instructions();
    return { type: "realtime", audio: { input, output }, ...(instructions && { instructions }) };
  }

  #take(event) {
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.#interrupt();
        this.#say("Listening");
        break;
      case "input_audio_buffer.speech_stopped":
        this.#say("Thinking");
        break;
      case "input_audio_buffer.committed":
        this.#ask(event.item_id);
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.#heard(event.item_id, event.delta, true);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.#heard(event.item_id, event.transcript, false);
        break;
      case "response.created":
        this.#begin(event.response.id);
        break;
      case "response.output_item.added":
        if (this.#answer) this.#answer.item = event.item.id;
        break;
      case "response.output_audio_transcript.delta":
        this.#answer?.turn.addText(event.delta);
        break;
      case "response.output_audio.delta":
        this.#answer?.turn.addSamples(event.samples, event.start_delay_ms);
        if (!this.#answer?.cut) this.#say("Speaking");
        break;
      case "output_audio_buffer.started":
        this.#say("Speaking");
        break;
      case "output_audio_buffer.stopped":
      case "output_audio_buffer.cleared":
        this.#rest();
        break;
      case "response.done":
        this.#finish(event.response.status === "completed" ? "done" : "stopped", event.response.status_details?.error);
        // In a call the sound begins when the gateway plays it, maybe later.
        if (!event.response.output.length && byId("live-state").textContent === "Thinking") this.#rest();
        break;
      case "lost":
        this.#before = byId("live-state").textContent;
        this.#say("Connecting …");
        break;
      case "back":
        this.#say(this.#before);
        break;
      case "renewed":
        this.#renew(event.again);
        break;
      case "error":
        this.page.notice(event.error.message);
        break;
      case "closed":
        if (this.active) this.page.notice("The conversation has ended.");
        this.end();
    }
    this.page.follow();
  }

  /** Another session goes on with the conversation; a question that is asked again is shown when it is. */
  #renew(again) {
    const last = this.#answer;
    if (last && !last.ended) last.turn.cut();
    this.#finish("stopped");
    this.#answer = null;
    if (again && this.#item !== null) {
      this.#questions.get(this.#item)?.remove();
      this.#questions.delete(this.#item);
      if (last?.question === this.#item) {
        this.#answers.pop();
        last.turn.release();
        last.turn.element.remove();
      }
      this.#item = null;
    }
    this.#say("Listening");
  }

  /** What was said so far, as items of a conversation. */
  #history() {
    const items = [];
    const add = (role, type, text) => items.push({ type: "message", role, content: [{ type, text }] });
    for (const [item, element] of this.#questions) {
      const words = element.querySelector(".words").textContent;
      const answers = this.#answers.filter(({ question, turn }) => question === item && turn.text);
      if (words === "…" || !answers.length) continue;
      add("user", "input_text", words);
      for (const { turn } of answers) add("assistant", "output_text", turn.text);
    }
    return items;
  }

  #ask(item) {
    this.#item = item;
    const turn = userTurn("…", []);
    this.#questions.set(item, turn);
    this.page.turns.append(turn);
  }

  #begin(id) {
    const plays = this.#link?.kind !== "webrtc";
    const turn = new AnswerTurn(plays, () => {
      this.page.changed();
      // When it is played again, all of it that is ever to be heard has been.
      answer.item = null;
      if (this.#answer === answer) this.#rest();
    });
    const answer = (this.#answer = { id, turn, question: this.#item, item: null, ended: false, cut: false });
    this.#answers.push(answer);
    this.page.turns.append(turn.element);
    this.page.changed();
  }

  /** The user speaks: what is being heard ends, and the gateway learns how much was. */
  #interrupt() {
    if (!this.#answer) return;
    this.#answer.cut = true;
    const { item, turn } = this.#answer;
    const heard = turn.cut();
    if (heard !== null && item) this.#link?.truncate?.(item, heard);
  }

  #finish(state, error) {
    if (!this.#answer || this.#answer.ended) return;
    this.#answer.ended = true;
    this.#answer.turn.end(state, error?.message ?? "");
  }

  async #note() {
    const energy = await this.#link?.energy?.();
    if (energy !== undefined) this.#button.dataset.energy = energy;
    if (this.#link) this.#timer = setTimeout(() => this.#note(), NOTE_MS);
  }

  /** Show what is heard of a question, in pieces or at last the whole. */
  #heard(item, words, goesOn) {
    const shown = this.#questions.get(item)?.querySelector(".words");
    if (!shown) return;
    const before = goesOn && shown.textContent !== "…" ? shown.textContent : "";
    shown.textContent = before + words;
  }

  /** An answer has been heard, unless the user has begun to speak. */
  #rest() {
    if (this.#link && byId("live-state").textContent !== "Listening") this.#say("Listening");
  }

  #say(state) {
    byId("live-state").textContent = state;
  }

  #show() {
    this.#button.setAttribute("aria-pressed", String(this.active));
    byId("live-panel").hidden = !this.active;
    byId("row").hidden = this.active;
    if (!this.active) delete this.#button.dataset.link;
  }
}
