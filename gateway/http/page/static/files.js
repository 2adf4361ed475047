// Files that go with the next message.

const KINDS = ["image", "audio", "video"];
const NAMES = { image: "picture", audio: "recording", video: "video" };
const SIGNS = { audio: "♪", video: "▶" };
const MIB = 2 ** 20;

export class FileError extends Error {}

/** A picture, recording or video. */
export class Attachment {
  constructor(file) {
    this.file = file;
    this.kind = KINDS.find((kind) => file.type.startsWith(`${kind}/`));
    if (!this.kind) throw new FileError(`“${file.name}” is not a picture, recording or video.`);
    if (!file.size) throw new FileError(`“${file.name}” is empty.`);
    this.url = URL.createObjectURL(file);
  }

  /** Throw where the gateway would refuse it: before it is uploaded. */
  async check(limits) {
    const most = limits?.item_bytes ?? Infinity;
    if (this.file.size > most) {
      throw new FileError(`“${this.file.name}” has ${mib(this.file.size)}; a file may have ${mib(most)} at most.`);
    }
    if (this.kind !== "image") return;
    try {
      (await createImageBitmap(this.file)).close();
    } catch (error) {
      if (!(error instanceof DOMException)) throw error;
      throw new FileError(`“${this.file.name}” cannot be read as a picture. Save it as JPEG or PNG.`);
    }
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

/** What the gateway takes of files in one request. */
export class FileBudget {
  #bytes;
  #items;

  constructor(limits) {
    this.limits = limits;
    this.#bytes = limits?.request_bytes ?? Infinity;
    this.#items = { image: limits?.images ?? Infinity, audio: limits?.audios ?? Infinity, video: limits?.videos ?? Infinity };
  }

  /** Take room for a file; false if there is none. */
  take({ kind, file }) {
    if (file.size > this.#bytes || !this.#items[kind]) return false;
    this.#bytes -= file.size;
    this.#items[kind] -= 1;
    return true;
  }

  /** Throw if a message's own files are too many or too large. */
  require(attachments) {
    for (const each of attachments) {
      if (this.take(each)) continue;
      const most = this.limits[`${each.kind}s`];
      if (attachments.filter(({ kind }) => kind === each.kind).length > most) {
        throw new FileError(most ? `A message may have ${most} ${NAMES[each.kind]}s at most.` : `The model takes no ${NAMES[each.kind]}s.`);
      }
      throw new FileError(`All files of a message may have ${mib(this.limits.request_bytes)} at most.`);
    }
  }
}

/** The files below the message field. */
export class Tray {
  #attachments = [];

  /**
   * @param {Element} list where they are shown
   * @param {{notice: (words: string) => void, limits: () => object, changed: () => void}} page
   */
  constructor(list, page) {
    this.list = list;
    this.page = page;
  }

  async add(files) {
    for (const file of files) {
      try {
        const attachment = new Attachment(file);
        await attachment.check(this.page.limits()).catch((error) => {
          attachment.release();
          throw error;
        });
        this.#attachments.push(attachment);
        this.page.notice("");
      } catch (error) {
        if (!(error instanceof FileError)) throw error;
        this.page.notice(error.message);
      }
    }
    this.#draw();
  }

  get attachments() {
    return [...this.#attachments];
  }

  get empty() {
    return !this.#attachments.length;
  }

  /** Give the files away. */
  take() {
    const taken = this.#attachments;
    this.put([]);
    return taken;
  }

  /** Show these files instead. */
  put(attachments) {
    this.#attachments = attachments;
    this.#draw();
  }

  /** Forget the files. */
  clear() {
    for (const each of this.take()) each.release();
  }

  #draw() {
    this.list.replaceChildren(...this.#attachments.map((each) => this.#row(each)));
    this.page.changed();
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
      this.put(this.#attachments.filter((each) => each !== attachment));
      attachment.release();
      this.page.notice("");
      document.getElementById("text").focus();
    };
    row.append(sign, name, remove);
    return row;
  }
}

function mib(bytes) {
  return `${(bytes / MIB).toFixed(1)} MiB`;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new FileError(`“${file.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}
