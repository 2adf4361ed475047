// Files that go with the next message.

const KINDS = ["image", "audio", "video"];
const SIGNS = { audio: "♪", video: "▶" };

export class FileError extends Error {}

/** A picture, sound or video. */
export class Attachment {
  constructor(file) {
    this.file = file;
    this.kind = KINDS.find((kind) => file.type.startsWith(`${kind}/`));
    if (!this.kind) throw new FileError(`“${file.name}” is not a picture, sound or video.`);
    if (!file.size) throw new FileError(`“${file.name}” is empty.`);
    this.url = URL.createObjectURL(file);
  }

  /** As a part of a message. */
  async part() {
    const type = `${this.kind}_url`;
    return { type, [type]: { url: await dataUrl(this.file) } };
  }

  /** As something to see or hear. */
  element() {
    const element = document.createElement(this.kind === "image" ? "img" : this.kind);
    element.className = "media";
    element.src = this.url;
    if (this.kind === "image") element.alt = this.file.name;
    else {
      element.controls = true;
      element.setAttribute("aria-label", this.file.name);
    }
    return element;
  }

  release() {
    URL.revokeObjectURL(this.url);
  }
}

/** The files below the message field. */
export class Tray {
  #attachments = [];

  constructor(list, say) {
    this.list = list;
    this.say = say;
  }

  add(files) {
    for (const file of files) {
      try {
        this.#attachments.push(new Attachment(file));
      } catch (error) {
        if (!(error instanceof FileError)) throw error;
        this.say(error.message);
      }
    }
    this.#draw();
  }

  get empty() {
    return !this.#attachments.length;
  }

  /** Give the files away. */
  take() {
    const taken = this.#attachments;
    this.#attachments = [];
    this.#draw();
    return taken;
  }

  #draw() {
    this.list.replaceChildren(...this.#attachments.map((each) => this.#row(each)));
  }

  #row(attachment) {
    const row = document.createElement("li");
    const sign = document.createElement(attachment.kind === "image" ? "img" : "span");
    if (attachment.kind === "image") {
      sign.src = attachment.url;
      sign.alt = "";
    } else {
      sign.className = "kind";
      sign.textContent = SIGNS[attachment.kind];
    }
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = attachment.file.name;
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${attachment.file.name}`);
    remove.onclick = () => {
      this.#attachments = this.#attachments.filter((each) => each !== attachment);
      attachment.release();
      this.#draw();
      document.getElementById("text").focus();
    };
    row.append(sign, name, remove);
    return row;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new FileError(`“${file.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}
