// The dialog with earlier conversations, and the instructions that the model gets before each.

const INSTRUCTIONS = "omnirelay-instructions";
const byId = (id) => document.getElementById(id);

export class Menu {
  #dialog = byId("menu");
  #store = null;

  /** @param {(id: string | null) => Promise<void>} onOpen called to open a conversation; null: a new one */
  constructor(onOpen) {
    this.onOpen = onOpen;
    byId("menu-open").onclick = () => this.#show();
    byId("menu-close").onclick = () => this.#dialog.close();
    // A click beside it is one on its backdrop.
    this.#dialog.onclick = ({ target }) => target === this.#dialog && this.#dialog.close();
    byId("system").value = localStorage.getItem(INSTRUCTIONS) ?? "";
    byId("system").onchange = () => localStorage.setItem(INSTRUCTIONS, this.instructions);
  }

  /** What the model is told first; empty for nothing. */
  get instructions() {
    return byId("system").value.trim();
  }

  /** @param {Store | null} store null where the browser keeps nothing */
  list(store) {
    this.#store = store;
  }

  async #show() {
    await this.#draw();
    this.#dialog.showModal();
  }

  async #draw() {
    const known = (await this.#store?.list().catch(() => [])) ?? [];
    byId("conversations").replaceChildren(...known.map((each) => this.#row(each)));
  }

  #row({ id, title, saved }) {
    const row = document.createElement("li");
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open";
    open.textContent = title || "(files)";
    if (id === this.#store.current) open.setAttribute("aria-current", "true");
    const time = document.createElement("time");
    time.textContent = new Date(saved).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(time);
    open.onclick = async () => {
      this.#dialog.close();
      await this.onOpen(id);
    };
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete the conversation “${open.firstChild.textContent}”`);
    remove.onclick = async () => {
      if (id === this.#store.current) await this.onOpen(null);
      await this.#store.forget(id);
      await this.#draw();
    };
    row.append(open, remove);
    return row;
  }
}
