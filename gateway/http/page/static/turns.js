// What was asked and answered, as the page shows it.

import { join, RATE } from "./pcm.js";
import { Playback } from "./player.js";
import { Waveform } from "./waveform.js";

const PLAY = "M8 5.5v13l10.5-6.5z";
const PAUSE = "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z";
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

/** Show a question. */
export function userTurn(text, attachments) {
  const turn = make("article", "turn user");
  turn.setAttribute("aria-label", "You");
  turn.append(...attachments.map((each) => each.element()));
  if (text) turn.append(make("p", "words", text));
  return turn;
}

/** An answer that comes, and can be heard again. */
export class AnswerTurn {
  #words = make("p", "words");
  #facts = make("ul", "facts");
  #waveform = null;
  #pieces = [];
  #playback = null;
  #button = null;
  #asked = performance.now();
  #firstText = null;
  #firstAudio = null;
  #busy = true;

  constructor(spoken, onQuiet) {
    this.spoken = spoken;
    this.onQuiet = onQuiet;
    this.element = make("article", "turn assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true");
    this.element.append(this.#words, this.#facts);
    if (spoken) this.#playback = new Playback(() => this.#quiet());
    this.#tick();
  }

  get text() {
    return this.#words.textContent;
  }

  get playing() {
    return this.#playback !== null;
  }

  addText(text) {
    this.#firstText ??= performance.now() - this.#asked;
    this.#words.append(this.text ? text : text.trimStart());
  }

  addSamples(samples) {
    if (!samples.length) return;
    if (this.#firstAudio === null) {
      this.#firstAudio = performance.now() - this.#asked;
      this.#addSound();
    }
    this.#pieces.push(samples);
    this.#waveform.push(samples);
    this.#playback?.push(samples);
  }

  /** The answer is complete, or broken off. */
  end(state, message = "", retry = null) {
    this.#busy = false;
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.state = state;
    if (message) {
      const wrong = make("p", "wrong", message);
      wrong.setAttribute("role", "alert");
      this.element.insertBefore(wrong, this.#facts);
    }
    if (retry) {
      const again = make("button", "quiet again", "Try again");
      again.type = "button";
      again.onclick = retry;
      this.element.append(again);
    }
    if (this.#playback && state !== "done") this.#playback.stop();
    else this.#playback?.end();
    this.#showFacts();
  }

  /** Be silent. */
  hush() {
    this.#playback?.stop();
  }

  #addSound() {
    const row = make("div", "sound");
    this.#button = make("button", "play");
    this.#button.type = "button";
    this.#button.onclick = () => (this.#playback ? this.hush() : this.#again());
    const canvas = make("canvas", "");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Waveform of the spoken answer");
    row.append(this.#button, canvas);
    this.element.insertBefore(row, this.#facts);
    this.#waveform = new Waveform(canvas);
    this.#showButton();
  }

  #again() {
    this.#playback = new Playback(() => this.#quiet());
    this.#playback.push(join(this.#pieces));
    this.#playback.end();
    this.#showButton();
    this.#tick();
  }

  #quiet() {
    const played = this.#playback;
    this.#playback = null;
    this.#note(played);
    this.#showButton();
    this.#waveform?.draw(Infinity);
    this.#showFacts();
    this.onQuiet();
  }

  #showButton() {
    if (!this.#button) return;
    const label = this.#playback ? "Stop the sound" : "Play the answer";
    if (this.#button.getAttribute("aria-label") === label) return;
    this.#button.setAttribute("aria-label", label);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 24 24");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", this.#playback ? PAUSE : PLAY);
    svg.append(path);
    this.#button.replaceChildren(svg);
  }

  #tick() {
    if (this.#playback) {
      this.#playback.level();
      this.#note(this.#playback);
      this.#waveform?.draw(this.#playback.position());
    }
    if (this.#busy) this.#showFacts();
    if (!this.#busy && !this.#playback) return;
    if (STILL.matches) setTimeout(() => this.#tick(), 250);
    else requestAnimationFrame(() => this.#tick());
  }

  /** What was played, for those who look at the page's elements. */
  #note(playback) {
    if (!playback) return;
    const { dataset } = this.element;
    dataset.scheduled = playback.scheduled;
    dataset.gaps = Math.max(playback.gaps, dataset.gaps ?? 0);
    dataset.heard = Math.max(playback.heard, dataset.heard ?? 0).toFixed(3);
  }

  #showFacts() {
    const now = performance.now() - this.#asked;
    const facts = [];
    if (this.#firstText !== null) facts.push(["first text", seconds(this.#firstText)]);
    if (this.#firstAudio !== null) facts.push(["first audio", seconds(this.#firstAudio)]);
    else if (this.#busy) facts.push(["waiting", seconds(now), "live"]);
    const samples = this.#pieces.reduce((sum, piece) => sum + piece.length, 0);
    if (samples) facts.push(["speech", seconds((1000 * samples) / RATE), this.#busy ? "live" : ""]);
    const gaps = Number(this.element.dataset.gaps ?? 0);
    if (gaps) facts.push(["pauses", String(gaps)]);
    if (this.element.dataset.state === "stopped") facts.push(["stopped", ""]);
    const key = facts.join();
    if (key === this.#shown) return;
    this.#shown = key;
    const { dataset } = this.element;
    if (this.#firstAudio !== null) dataset.firstAudioMs = Math.round(this.#firstAudio);
    dataset.samples = samples;
    this.#facts.replaceChildren(
      ...facts.map(([name, value, mark = ""]) => {
        const fact = make("li", mark, `${name} `);
        fact.append(make("b", "", value));
        return fact;
      }),
    );
  }

  #shown = "";
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}
