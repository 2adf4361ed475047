// A waveform as bars: those that were heard in colour.

import { RATE } from "./pcm.js";

const BAR_SAMPLES = RATE * 0.04;
const BAR = 3;
const SPACE = 2;

const waveforms = new WeakMap(); // by canvas: none is kept alive when its turn is gone
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) waveforms.get(target)?.redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const canvas of document.querySelectorAll(".sound canvas")) waveforms.get(canvas)?.redraw();
});

export class Waveform {
  #peaks = [];
  #filled = 0;
  #heard = 0;

  constructor(canvas) {
    this.canvas = canvas;
    waveforms.set(canvas, this);
    resized.observe(canvas);
  }

  /** The canvas goes. */
  release() {
    resized.unobserve(this.canvas);
  }

  redraw() {
    this.draw(this.#heard);
  }

  push(samples) {
    for (const sample of samples) {
      if (this.#filled === 0) this.#peaks.push(0);
      const level = Math.abs(sample);
      if (level > this.#peaks[this.#peaks.length - 1]) this.#peaks[this.#peaks.length - 1] = level;
      this.#filled = (this.#filled + 1) % BAR_SAMPLES;
    }
  }

  /** @param {number} heard samples that were played */
  draw(heard) {
    this.#heard = heard;
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const room = Math.max(1, Math.floor((width + SPACE) / (BAR + SPACE)));
    const bars = Math.min(room, this.#peaks.length);
    const each = this.#peaks.length / bars;
    for (let i = 0; i < bars; i++) {
      const part = this.#peaks.slice(Math.floor(i * each), Math.max(Math.floor((i + 1) * each), Math.floor(i * each) + 1));
      const tall = Math.max(3, Math.sqrt(Math.max(...part)) * height);
      pen.fillStyle = style.getPropertyValue(i * each * BAR_SAMPLES < heard ? "--accent" : "--wave");
      pen.beginPath();
      pen.roundRect(i * (BAR + SPACE), (height - tall) / 2, BAR, tall, BAR / 2);
      pen.fill();
    }
  }
}
