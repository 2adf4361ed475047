// Keeps the conversation of this tab in the browser, so that a reload does not lose it.

const DATABASE = "omnirelay";
const EXCHANGES = "exchanges";
const TAB = "omnirelay-conversation";
const KEPT_MS = 24 * 3600 * 1000;

/** The exchanges of this tab; those of closed tabs are deleted a day later. */
export class Store {
  #database;
  #conversation;

  /** @returns {Promise<Store | null>} null where the browser keeps nothing */
  static async open() {
    try {
      const opening = indexedDB.open(DATABASE, 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(EXCHANGES);
      const store = new Store(await finished(opening));
      await store.#forgetOld();
      return store;
    } catch (error) {
      console.info(`the conversation is not kept: ${error}`);
      return null;
    }
  }

  constructor(database) {
    this.#database = database;
    this.#conversation = sessionStorage.getItem(TAB) ?? `${Date.now()}-${Math.random()}`;
    sessionStorage.setItem(TAB, this.#conversation);
  }

  /** @returns {Promise<object[]>} what was saved, in its order */
  load() {
    return finished(this.#objects("readonly").getAll(this.#own()));
  }

  /** Keep an exchange, `{order, ...}`, in the place of the one of that order. */
  async save(exchange) {
    try {
      const record = { ...exchange, saved: Date.now() };
      await finished(this.#objects("readwrite").put(record, [this.#conversation, exchange.order]));
    } catch (error) {
      // No room: what is on the page is still there until it is closed.
      console.info(`an exchange is not kept: ${error}`);
    }
  }

  delete(order) {
    return finished(this.#objects("readwrite").delete([this.#conversation, order]));
  }

  clear() {
    return finished(this.#objects("readwrite").delete(this.#own()));
  }

  #own() {
    return IDBKeyRange.bound([this.#conversation, 0], [this.#conversation, Infinity]);
  }

  #objects(mode) {
    return this.#database.transaction(EXCHANGES, mode).objectStore(EXCHANGES);
  }

  async #forgetOld() {
    const objects = this.#objects("readwrite");
    const walk = objects.openCursor();
    await new Promise((resolve, reject) => {
      walk.onerror = () => reject(walk.error);
      walk.onsuccess = () => {
        const cursor = walk.result;
        if (!cursor) return resolve();
        const [conversation] = cursor.key;
        if (conversation !== this.#conversation && cursor.value.saved < Date.now() - KEPT_MS) cursor.delete();
        cursor.continue();
      };
    });
  }
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
