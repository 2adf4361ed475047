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
    return finished(this.#database.transaction(EXCHANGES).objectStore(EXCHANGES).getAll(this.#own()));
  }

  /** Keep an exchange, `{order, ...}`, in the place of the one of that order. */
  async save(exchange) {
    try {
      const record = { ...exchange, saved: Date.now() };
      await this.#change((objects) => objects.put(record, [this.#conversation, exchange.order]));
    } catch (error) {
      // No room: what is on the page is still there until it is closed.
      console.info(`an exchange is not kept: ${error}`);
    }
  }

  delete(order) {
    return this.#change((objects) => objects.delete([this.#conversation, order]));
  }

  clear() {
    return this.#change((objects) => objects.delete(this.#own()));
  }

  #own() {
    return IDBKeyRange.bound([this.#conversation, 0], [this.#conversation, Infinity]);
  }

  #forgetOld() {
    return this.#change((objects) => {
      objects.openCursor().onsuccess = (event) => {
        const cursor = event.target.result;
        if (!cursor) return;
        const [conversation] = cursor.key;
        if (conversation !== this.#conversation && cursor.value.saved < Date.now() - KEPT_MS) cursor.delete();
        cursor.continue();
      };
    });
  }

  /** @returns {Promise<void>} resolves once the change is committed: a reload right after it does not undo it */
  #change(make) {
    const transaction = this.#database.transaction(EXCHANGES, "readwrite");
    make(transaction.objectStore(EXCHANGES));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
