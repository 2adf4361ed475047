// The conversation button: an open microphone, which interrupts answers.

import { ApiError } from "./api.js";
import { openLink } from "./links.js";
import { openMicrophone, RecorderError } from "./recorder.js";
import { AnswerTurn, userTurn } from "./turns.js";

const NOTE_MS = 250;
const LABELS = { false: "Begin a conversation: the microphone stays open", true: "End the conversation" };

export class Live {
  #button = document.getElementById("live");
  #microphone = null;
  #link = null;
  #questions = new Map(); // by item
  #answer = null; // the last one
  #timer = 0;

  /**
   * @param {{turns: HTMLElement, voice: () => string, calls: () => boolean, begin: () => void, changed: () => void,
   *     notice: (words: string) => void, announce: (words: string) => void, follow: () => void}} page
   */
  constructor(page) {
    this.page = page;
    this.#button.onclick = () => (this.active ? this.end() : this.begin());
  }

  /** The microphone is open, or is about to be. */
  get active() {
    return this.#microphone !== null;
  }

  async begin() {
    this.page.begin();
    try {
      this.#microphone = await openMicrophone();
      this.#show();
      const microphone = this.#microphone;
      const link = await openLink(microphone, this.#session(), this.page.calls(), (event) => this.#take(event));
      // It may have been ended meanwhile.
      if (this.#microphone !== microphone) {
        link.close();
        return;
      }
      this.#link = link;
      this.#button.dataset.link = link.kind;
      this.page.announce("Listening.");
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
    this.#link?.close();
    this.#answer?.turn.cut();
    this.#finish("stopped");
    this.#microphone = this.#link = null;
    this.#show();
    this.page.changed();
  }

  #session() {
    const input = { turn_detection: { type: "server_vad" }, transcription: {} };
    const output = this.page.voice() ? { voice: this.page.voice() } : {};
    return { type: "realtime", audio: { input, output } };
  }

  #take(event) {
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.#interrupt();
        break;
      case "input_audio_buffer.committed":
        this.#ask(event.item_id);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.#questions.get(event.item_id)?.querySelector(".words")?.replaceChildren(event.transcript);
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
        break;
      case "response.done":
        this.#finish(event.response.status === "completed" ? "done" : "stopped", event.response.status_details?.error);
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

  #ask(item) {
    const turn = userTurn("…", []);
    this.#questions.set(item, turn);
    this.page.turns.append(turn);
  }

  #begin(id) {
    const plays = this.#link?.kind !== "webrtc";
    const turn = new AnswerTurn(plays, () => this.page.changed());
    this.#answer = { id, turn, item: null, ended: false };
    this.page.turns.append(turn.element);
    this.page.changed();
  }

  /** The user speaks: what is being heard ends, and the gateway learns how much was. */
  #interrupt() {
    const heard = this.#answer?.turn.cut();
    if (heard !== null && heard !== undefined && this.#answer.item) this.#link?.truncate?.(this.#answer.item, heard);
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

  #show() {
    const label = LABELS[this.active];
    this.#button.setAttribute("aria-pressed", String(this.active));
    this.#button.setAttribute("aria-label", label);
    this.#button.title = label;
    if (!this.active) delete this.#button.dataset.link;
  }
}
