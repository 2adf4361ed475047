// What was asked and answered, as the page shows it.

import { rendered } from "./markdown.js";
import { floats, join, PcmReader, RATE, wav } from "./pcm.js";
import { Playback } from "./player.js";
import { Waveform } from "./waveform.js";

const ICONS = {
  play: "M8 5.5v13l10.5-6.5z",
  pause: "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z",
};
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

function make(tag, name, text = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
}

function button(name, text, run) {
  const element = make("button", name, text);
  element.type = "button";
  element.onclick = run;
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

/** An answer while it is received, and afterwards. */
export class AnswerTurn {
  #words = make("div", "words");
  #facts = make("ul", "facts");
  #actions = make("div", "actions");
  #text = "";
  #drawn = true;
  #waveform = null;
  #pieces = [];
  #playback = null;
  #button = null;
  #asked = performance.now();
  #firstText = null;
  #firstAudio = null;
  #busy = true;
  #status = "";
  #shown = "";
  #url = null;

  /**
   * @param {boolean} spoken whether speech comes, to be played as it does
   * @param {() => void} onSound called when sound begins or ends
   * @param {(() => void) | null} onRead called when an answer without speech is to be read aloud; null if none can be
   */
  constructor(spoken, onSound, onRead = null) {
    this.onSound = onSound;
    this.onRead = onRead;
    this.element = make("article", "turn assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true");
    this.element.append(this.#words, this.#facts, this.#actions);
    if (spoken) this.#playback = new Playback(() => this.#quiet());
    this.#tick();
  }

  /** An answer of before: `{state, text, samples, message}`. */
  static restored({ state, text, samples, message }, onSound, onRead, action) {
    const turn = new AnswerTurn(false, onSound, onRead);
    turn.addText(text);
    turn.addSamples(samples);
    turn.#firstText = turn.#firstAudio = null;
    turn.end(state, message, action);
    turn.#waveform?.draw(Infinity);
    return turn;
  }

  get text() {
    return this.#text;
  }

  /** What it said, as 16-bit samples. */
  get samples() {
    return join(this.#pieces);
  }

  addText(text) {
    this.#firstText ??= performance.now() - this.#asked;
    this.#text += this.#text ? text : text.trimStart();
    this.#drawn = false;
  }

  /** @param {number} delay how many milliseconds to wait before the first ones are played */
  addSamples(samples, delay = 0) {
    if (!samples.length) return;
    if (!this.#pieces.length) {
      this.#playback?.wait(delay);
      this.#firstAudio = performance.now() - this.#asked;
      this.#addSound();
    }
    const heard = floats(samples);
    this.#pieces.push(samples);
    this.#waveform.push(heard);
    this.#playback?.push(heard);
  }

  /** Say why nothing comes. */
  status(words) {
    this.#status = words;
  }

  /**
   * The answer is complete, was stopped, or failed.
   * @param {string} message what went wrong
   * @param {{label: string, run: () => void} | null} action what the user may do about it
   */
  end(state, message = "", action = null) {
    this.#busy = false;
    this.#status = "";
    this.element.setAttribute("aria-busy", "false");
    this.element.dataset.state = state;
    this.#draw();
    if (message) this.#warn(message);
    if (action) this.#actions.append(button("quiet again", action.label, action.run));
    if (this.#text) this.#actions.append(button("quiet", "Copy", (event) => copy(this.#text, event.target)));
    if (this.#pieces.length) this.#actions.append(this.#download());
    else if (this.#text && this.onRead) this.#actions.append(button("quiet read", "Read aloud", this.onRead));
    if (this.#playback && state !== "done") this.#playback.stop();
    else this.#playback?.end();
    this.#showFacts();
  }

  /**
   * Play what a finished answer sounds like.
   * @param {(text: string) => AsyncIterable<object>} speak events of the speech of a text
   */
  async read(speak) {
    const pressed = this.#actions.querySelector(".read");
    pressed.disabled = true;
    this.element.querySelector(".wrong")?.remove();
    this.#asked = performance.now();
    this.#playback = new Playback(() => this.#quiet());
    this.#tick();
    const reader = new PcmReader();
    try {
      for await (const { audio, start_delay_ms } of speak(this.#words.innerText)) {
        this.addSamples(reader.read(audio), start_delay_ms);
      }
      this.#playback?.end();
      pressed.replaceWith(this.#download());
    } catch (error) {
      this.#playback?.stop();
      this.element.querySelector(".sound")?.remove();
      this.#waveform?.release();
      this.#waveform = this.#button = null;
      this.#firstAudio = null;
      this.#pieces = [];
      pressed.disabled = false;
      if (error.name !== "AbortError") this.#warn(error.message);
      throw error;
    }
  }

  #warn(message) {
    const wrong = make("p", "wrong", message);
    wrong.setAttribute("role", "alert");
    this.element.insertBefore(wrong, this.#facts);
  }

  /** Stop what is heard of it. @returns {number | null} how many milliseconds were; null if nothing is heard */
  cut() {
    if (!this.#playback) return null;
    const heard = Math.floor((1000 * this.#playback.position()) / RATE);
    this.#playback.stop();
    return heard;
  }

  /** The turn is taken off the page. */
  release() {
    this.#playback?.stop();
    this.#waveform?.release();
    if (this.#url) URL.revokeObjectURL(this.#url);
    this.element.remove();
  }

  #download() {
    const link = make("a", "quiet", "Download");
    link.download = "answer.wav";
    link.href = "#";
    // Made when it is wanted: it needs as much memory as the speech.
    link.addEventListener("click", () => {
      this.#url ??= URL.createObjectURL(wav(this.samples));
      link.href = this.#url;
    });
    return link;
  }

  #addSound() {
    const row = make("div", "sound");
    this.#button = button("play", "", () => this.#press());
    const canvas = make("canvas", "");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Waveform of the spoken answer");
    row.append(this.#button, canvas);
    this.element.insertBefore(row, this.#facts);
    this.#waveform = new Waveform(canvas);
    this.#showButton();
  }

  #press() {
    const playback = this.#playback;
    if (!playback) this.#again();
    else if (playback.paused) playback.resume();
    else playback.pause();
    this.#showButton();
  }

  #again() {
    this.#playback = new Playback(() => this.#quiet());
    this.#playback.push(floats(this.samples));
    this.#playback.end();
    this.onSound();
    this.#tick();
  }

  #quiet() {
    const played = this.#playback;
    this.#playback = null;
    this.#note(played);
    this.#showButton();
    this.#waveform?.draw(Infinity);
    this.#showFacts();
    this.onSound();
  }

  #showButton() {
    if (!this.#button) return;
    const playing = this.#playback && !this.#playback.paused;
    const label = playing ? "Pause" : this.#playback ? "Continue" : "Play the answer";
    if (this.#button.getAttribute("aria-label") === label) return;
    this.#button.setAttribute("aria-label", label);
    this.#button.title = label;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 24 24");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", playing ? ICONS.pause : ICONS.play);
    svg.append(path);
    this.#button.replaceChildren(svg);
  }

  #tick() {
    if (this.#playback) {
      this.#playback.level();
      this.#note(this.#playback);
      this.#waveform?.draw(this.#playback.position());
    }
    if (this.#busy) {
      this.#draw();
      this.#showFacts();
    }
    if (!this.#busy && !this.#playback) return;
    if (STILL.matches) setTimeout(() => this.#tick(), 250);
    else requestAnimationFrame(() => this.#tick());
  }

  #draw() {
    if (this.#drawn) return;
    this.#drawn = true;
    this.#words.replaceChildren(rendered(this.#text));
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
    if (gaps) facts.push(["gaps", String(gaps)]);
    if (this.element.dataset.state === "stopped") facts.push(["stopped", ""]);
    if (this.#status) facts.push(["", this.#status, "live"]);
    const key = facts.join();
    if (key === this.#shown) return;
    this.#shown = key;
    const { dataset } = this.element;
    if (this.#firstAudio !== null) dataset.firstAudioMs = Math.round(this.#firstAudio);
    dataset.samples = samples;
    this.#facts.replaceChildren(
      ...facts.map(([name, value, mark = ""]) => {
        const fact = make("li", mark, name && `${name} `);
        fact.append(make("b", "", value));
        return fact;
      }),
    );
  }
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch (error) {
    // Browsers give the clipboard only to pages on localhost or by https.
    console.info(`the clipboard cannot be used: ${error}`);
    pressed.textContent = "The browser does not allow it";
  }
  setTimeout(() => (pressed.textContent = "Copy"), 2000);
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(2)} s`;
}
