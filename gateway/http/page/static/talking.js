// The microphone button: hold it and release it to send, or press it once to begin and once to send.

import { RecorderError, Recording } from "./recorder.js";

const HOLD_MS = 350; // a shorter press begins a recording that the next press ends
const IDLE = ["Talk: hold, or press once to begin and once to send", "Hold to talk (F2)"];
const BUSY = ["Send the recording", "Press again to send (Enter), Esc to discard"];
const byId = (id) => document.getElementById(id);

export class Talking {
  #button = byId("talk");
  #recording = null;
  #starting = null; // a recording whose microphone is being asked for

  /**
   * @param {{begin: () => void, send: (recording: File) => void, notice: (words: string) => void,
   *     announce: (words: string) => void, focus: () => void}} page
   */
  constructor(page) {
    this.page = page;
    const on = (kind, run) => this.#button.addEventListener(kind, run);
    on("pointerdown", (event) => {
      if (event.button) return;
      this.#button.setPointerCapture(event.pointerId);
      this.press();
    });
    on("pointerup", (event) => this.release(this.#isOn(event)));
    on("pointercancel", () => this.discard());
    on("contextmenu", (event) => event.preventDefault());
    on("keydown", (event) => {
      if (event.key !== " " && event.key !== "Enter") return;
      event.preventDefault();
      event.stopPropagation();
      if (!event.repeat) this.press();
    });
    on("keyup", (event) => {
      if (event.key === " " || event.key === "Enter") this.release();
    });
    on("click", (event) => {
      // From assistive technology: no pointer, no key.
      if (event.detail === 0 && !event.pointerType) this.press();
    });
    byId("discard").onclick = () => this.discard();
  }

  /** A recording is being made, or is about to be. */
  get active() {
    return this.#recording !== null || this.#starting !== null;
  }

  /** Begin, or send what was said. */
  press() {
    if (this.#recording) this.send();
    else this.#begin();
  }

  /** The button or key was let go: after a long press that sends, beside the button it discards. */
  release(wanted = true) {
    const since = this.#recording?.pressed ?? this.#starting?.since;
    if (since === undefined || performance.now() - since < HOLD_MS) return;
    if (!wanted) this.discard();
    else if (this.#recording) this.send();
  }

  async send() {
    const recording = this.#end();
    if (recording) this.page.send(await recording.finish());
  }

  discard() {
    if (this.#starting) this.#starting.wanted = false;
    const recording = this.#end();
    if (!recording) return;
    recording.discard();
    this.page.announce("Discarded.");
  }

  #isOn({ clientX, clientY }) {
    const { left, right, top, bottom } = this.#button.getBoundingClientRect();
    return clientX >= left && clientX <= right && clientY >= top && clientY <= bottom;
  }

  async #begin() {
    if (this.#starting) return;
    this.page.begin();
    this.#starting = { since: performance.now(), wanted: true };
    const mine = this.#starting;
    this.#show(true);
    try {
      const recording = await Recording.begin();
      recording.pressed = mine.since;
      this.#recording = recording;
    } catch (error) {
      this.#show(false);
      if (!(error instanceof RecorderError)) throw error;
      this.page.notice(error.message);
      return;
    } finally {
      this.#starting = null;
    }
    byId("recording").hidden = false;
    byId("discard").hidden = false;
    byId("text").hidden = true;
    this.#recording.show(byId("level"), byId("clock"));
    this.page.announce("Recording.");
    if (!mine.wanted) this.discard();
  }

  #end() {
    const ended = this.#recording;
    this.#recording = null;
    if (ended) {
      this.#show(false);
      byId("recording").hidden = true;
      byId("discard").hidden = true;
      byId("text").hidden = false;
      this.page.focus();
    }
    return ended;
  }

  #show(pressed) {
    const [label, title] = pressed ? BUSY : IDLE;
    this.#button.setAttribute("aria-pressed", String(pressed));
    this.#button.setAttribute("aria-label", label);
    this.#button.title = title;
  }
}
