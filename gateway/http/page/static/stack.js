// The line that says whether the stack can serve, the API key, and the choice of voices.

import { ApiError, findGateways, keepKey, requireReady, servedModel, usedKey, useKey } from "./api.js";

const CHECK_MS = 5000;
const AWAY_MS = 1000; // while it cannot serve
const TEXT_ONLY = "(text only)";
const byId = (id) => document.getElementById(id);

export class Stack {
  model = null;
  #next = null; // timer of the next check
  #running = null; // the check in progress

  /** @param {(model: object) => void} onModel called when it is known what is served */
  constructor(onModel) {
    this.onModel = onModel;
    byId("key").value = usedKey();
    byId("key").onchange = () => {
      useKey(byId("key").value);
      this.model = null;
      this.check();
    };
  }

  /** The voice that is chosen: none for text alone, empty for the default. */
  get voice() {
    const chosen = byId("voice").value;
    return chosen === TEXT_ONLY ? null : chosen;
  }

  /** Look now. @returns {Promise<string>} why the stack cannot serve; empty if it can */
  check() {
    this.#running ??= this.#check().finally(() => (this.#running = null));
    return this.#running;
  }

  async #check() {
    clearTimeout(this.#next);
    const why = await this.#reason();
    byId("stack").dataset.state = why ? "away" : "ready";
    const words = why || `Ready · model ${this.model.id}`;
    byId("stack-text").textContent = words;
    byId("stack").title = words;
    this.#next = setTimeout(() => this.check(), why ? AWAY_MS : CHECK_MS);
    return why;
  }

  async #reason() {
    try {
      await requireReady();
      if (!this.model) await this.#learn();
      return "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (!error.keyRejected) return error.message;
      byId("key-field").hidden = false;
      return usedKey() ? "the API key is not accepted" : "needs an API key";
    }
  }

  async #learn() {
    await findGateways();
    this.model = await servedModel();
    keepKey();
    const options = [...this.model.voices, TEXT_ONLY].map((name) => new Option(name, name));
    byId("voice").replaceChildren(...options);
    this.onModel(this.model);
  }
}
