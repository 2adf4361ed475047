// The camera's button, while the microphone is open: what it sees goes with what is said.

const FRAME_MS = 500;
const LONGER_SIDE = 448; // pixels: at 4:3 192 tokens a second
const QUALITIES = [0.7, 0.4];
const LARGEST = 45000; // bytes: as base64 within a message of a call
const LABELS = { false: "Show what the camera sees", true: "Switch the camera off" };

export class Camera {
  #button = document.getElementById("live-camera");
  #view = document.getElementById("live-view");
  #canvas = document.createElement("canvas");
  #wanted = false;
  #stream = null;
  #timer = 0;

  /** @param {{send: (event: object) => void, notice: (words: string) => void}} page */
  constructor(page) {
    this.page = page;
    this.#button.onclick = () => (this.#wanted ? this.end() : this.begin());
  }

  async begin() {
    this.#wanted = true;
    this.#show();
    try {
      const video = { width: { ideal: LONGER_SIDE }, facingMode: { ideal: "environment" } };
      const stream = await navigator.mediaDevices.getUserMedia({ video });
      // It may have been switched off meanwhile.
      if (!this.#wanted || this.#stream) {
        stop(stream);
        return;
      }
      this.#stream = this.#view.srcObject = stream;
      stream.getVideoTracks()[0].onended = () => this.end();
      await this.#view.play();
      this.#show();
      this.#send(stream);
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      if (this.#wanted) this.page.notice(`The camera cannot be used: ${error.message}`);
      this.end();
    }
  }

  end() {
    clearTimeout(this.#timer);
    if (this.#stream) {
      stop(this.#stream);
      this.page.send({ type: "input_video_buffer.clear" });
    }
    this.#stream = this.#view.srcObject = null;
    this.#wanted = false;
    this.#show();
  }

  async #send(stream) {
    const image = await this.#frame();
    if (this.#stream !== stream) return;
    if (image) this.page.send({ type: "input_video_buffer.append", image });
    this.#timer = setTimeout(() => this.#send(stream), FRAME_MS);
  }

  /** What is seen now, as base64 of a JPEG file; nothing while there is no picture, or it is too large. */
  async #frame() {
    const { videoWidth, videoHeight } = this.#view;
    const scale = Math.min(1, LONGER_SIDE / Math.max(videoWidth, videoHeight));
    this.#canvas.width = Math.round(videoWidth * scale);
    this.#canvas.height = Math.round(videoHeight * scale);
    this.#canvas.getContext("2d").drawImage(this.#view, 0, 0, this.#canvas.width, this.#canvas.height);
    for (const quality of QUALITIES) {
      const file = await new Promise((resolve) => this.#canvas.toBlob(resolve, "image/jpeg", quality));
      if (file && file.size <= LARGEST) return base64(file);
    }
    return null;
  }

  #show() {
    this.#button.setAttribute("aria-pressed", String(this.#wanted));
    this.#button.setAttribute("aria-label", LABELS[this.#wanted]);
    this.#button.title = LABELS[this.#wanted];
    this.#view.hidden = !this.#stream;
  }
}

function stop(stream) {
  for (const track of stream.getTracks()) track.stop();
}

function base64(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.readAsDataURL(file);
  });
}
