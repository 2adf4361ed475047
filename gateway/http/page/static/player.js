// Plays samples while they arrive: each piece begins on the very sample at which the one before it ends.

import { RATE } from "./pcm.js";

const LEAD_S = 0.2; // how much later than it could a piece begins that follows none, so that the next ones are in time
const GROWN_LEAD_S = 1.2; // the same after the first gap

let context = null;
let current = null; // the playback that is heard: one at a time

/** The sound output; to be called from something the user does, or browsers keep it silent. */
export function output() {
  context ??= new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
  if (context.state === "suspended" && !current?.paused) context.resume();
  return context;
}

/** Stop what is heard. */
export function silence() {
  current?.stop();
}

/** Whether something is heard, or paused. */
export function sounding() {
  return current !== null;
}

/** One answer that is played; another that is being played stops. */
export class Playback {
  #context;
  #gain;
  #meter;
  #sources = new Set();
  #spans = []; // when which samples are heard: [time, first sample, samples]
  #next = 0;
  #held = null; // pieces, until it begins
  #timer = 0;
  #ended = false;
  #samples = new Float32Array(1024);

  scheduled = 0; // samples
  gaps = 0; // how often the next piece came too late
  heard = 0; // the loudest that went to the output
  paused = false;

  /** @param {() => void} onEnd called when all was played, or it was stopped */
  constructor(onEnd) {
    silence();
    this.#context = output();
    this.#gain = this.#context.createGain();
    this.#meter = this.#context.createAnalyser();
    this.onEnd = onEnd;
    this.#gain.connect(this.#meter).connect(this.#context.destination);
    current = this;
  }

  /** Begin so long after now, or when all is there; to be called before the first samples. */
  wait(ms) {
    if (ms <= 1000 * LEAD_S || this.#ended) return;
    this.#held = [];
    this.#timer = setTimeout(() => this.#release(), ms - 1000 * LEAD_S);
  }

  push(samples) {
    if (this.#ended || !samples.length) return;
    if (this.#held) {
      this.#held.push(samples);
      return;
    }
    const buffer = this.#context.createBuffer(1, samples.length, RATE);
    buffer.copyToChannel(samples, 0);
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#gain);
    source.onended = () => {
      this.#sources.delete(source);
      this.#finish();
    };
    this.#sources.add(source);
    const at = this.#time();
    source.start(at);
    this.#spans.push([at, this.scheduled, samples.length]);
    this.#next = at + samples.length / RATE;
    this.scheduled += samples.length;
  }

  /** Nothing more will come. */
  end() {
    this.#release();
    this.#ended = true;
    this.#finish();
  }

  /** Hold the sound where it is; its clock stops with it. */
  pause() {
    this.paused = true;
    this.#context.suspend();
  }

  resume() {
    this.paused = false;
    this.#context.resume();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#held = null;
    this.#ended = true;
    for (const source of this.#sources) {
      source.onended = null;
      source.stop();
    }
    this.#sources.clear();
    this.#finish();
  }

  /** How many samples have been heard. */
  position() {
    const now = this.#context.currentTime;
    let heard = 0;
    for (const [at, first, count] of this.#spans) {
      if (now >= at) heard = Math.min(first + (now - at) * RATE, first + count);
    }
    return heard;
  }

  /** How loud it is now, from 0 to 1. */
  level() {
    this.#meter.getFloatTimeDomainData(this.#samples);
    const level = this.#samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
    this.heard = Math.max(this.heard, level);
    return level;
  }

  #time() {
    const now = this.#context.currentTime;
    if (this.#next >= now && this.#next > 0) return this.#next;
    if (this.#next > 0) this.gaps += 1;
    // A gap is heard as a pause.  Waiting longer at the first one makes another less likely.
    const lead = this.gaps === 1 ? GROWN_LEAD_S : LEAD_S;
    return Math.round((now + lead) * RATE) / RATE;
  }

  #release() {
    clearTimeout(this.#timer);
    const held = this.#held ?? [];
    this.#held = null;
    for (const samples of held) this.push(samples);
  }

  #finish() {
    if (!this.#ended || this.#sources.size || !this.onEnd) return;
    const onEnd = this.onEnd;
    this.onEnd = null;
    if (this.paused) this.resume();
    if (current === this) current = null;
    // The meter's last view, before it falls silent.
    this.#gain.disconnect();
    this.#meter.disconnect();
    onEnd();
  }
}
