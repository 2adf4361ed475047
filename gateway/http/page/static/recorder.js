// The microphone, while the user talks.

export class RecorderError extends Error {}

const WORDS = {
  NotAllowedError: "The browser does not allow the microphone. Allow it in the address bar, and try again.",
  NotFoundError: "There is no microphone.",
  NotReadableError: "Another program uses the microphone.",
};

/** @returns {Promise<MediaStream>} the microphone, without the echo of what is played */
export async function openMicrophone() {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new RecorderError("Browsers give the microphone only to pages on localhost or by https.");
  }
  try {
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
    return await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    throw new RecorderError(WORDS[error.name] ?? `The microphone cannot be used: ${error.message}`);
  }
}

/** One recording. */
export class Recording {
  #pieces = [];
  #stopped;

  /** @returns {Promise<Recording>} one that is recording already */
  static async begin() {
    return new Recording(await openMicrophone());
  }

  constructor(stream) {
    this.stream = stream;
    this.began = performance.now();
    this.recorder = new MediaRecorder(stream, { audioBitsPerSecond: 64000 });
    this.recorder.ondataavailable = (event) => this.#pieces.push(event.data);
    // It stops by itself where the microphone is taken away.
    this.#stopped = new Promise((resolve) => (this.recorder.onstop = resolve));
    this.recorder.start();
    this.level = new Level(stream);
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }

  /** Draw what is heard, until it ends. */
  show(canvas, clock) {
    this.level.show(canvas, () => (clock.textContent = `${this.seconds.toFixed(1)} s`));
  }

  /** End it. @returns {Promise<File>} what was said */
  async finish() {
    this.#close();
    await this.#stopped;
    const type = this.recorder.mimeType.split(";")[0] || "audio/webm";
    return new File(this.#pieces, "what you said", { type });
  }

  /** End it, and forget what was said. */
  discard() {
    this.#close();
  }

  #close() {
    if (this.recorder.state !== "inactive") this.recorder.stop();
    for (const track of this.stream.getTracks()) track.stop();
    this.level.close();
  }
}

/** How loud a microphone is. */
export class Level {
  // A context of its own: the microphone's rate need not be that of the answers.
  #context = new AudioContext();
  #meter = this.#context.createAnalyser();

  /** @param {MediaStream} stream */
  constructor(stream) {
    this.#context.createMediaStreamSource(stream).connect(this.#meter);
  }

  /** Draw it until it is closed; `tick` is called each time. */
  show(canvas, tick = () => {}) {
    const samples = new Float32Array(2048);
    const levels = new Float32Array(60);
    const draw = () => {
      if (this.#context.state === "closed") return;
      this.#meter.getFloatTimeDomainData(samples);
      levels.copyWithin(0, 1);
      levels[59] = samples.reduce((most, sample) => Math.max(most, Math.abs(sample)), 0);
      bars(canvas, levels);
      tick();
      requestAnimationFrame(draw);
    };
    draw();
  }

  close() {
    this.#context.close();
  }
}

function bars(canvas, levels) {
  const scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(canvas).getPropertyValue("--accent");
  const step = canvas.width / levels.length;
  levels.forEach((level, i) => {
    const tall = Math.max(2 * scale, Math.min(1, 1.5 * Math.sqrt(level)) * canvas.height);
    pen.fillRect(i * step, (canvas.height - tall) / 2, step * 0.6, tall);
  });
}
