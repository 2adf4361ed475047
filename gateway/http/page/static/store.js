// Keeps conversations in the browser: that of this tab, so that a reload does not lose it, and earlier ones.

const DATABASE = "omnirelay";
const EXCHANGES = "exchanges"; // by conversation and order
const CONVERSATIONS = "conversations"; // {title, saved} by id
const TAB = "omnirelay-conversation";
const KEPT_MS = 30 * 24 * 3600 * 1000;
const KEPT = 20; // conversations

/** The exchanges of this tab's conversation, and the list of all. */
export class Store {
  #database;
  #conversation;
  #saved; // when the conversation was saved last, as far as this tab knows

  /** @returns {Promise<Store | null>} null where the browser keeps nothing */
  static async open() {
    try {
      const opening = indexedDB.open(DATABASE, 2);
      opening.onupgradeneeded = () => {
        const { result } = opening;
        for (const name of result.objectStoreNames) result.deleteObjectStore(name);
        for (const name of [EXCHANGES, CONVERSATIONS]) result.createObjectStore(name);
      };
      const database = await finished(opening);
      // A newer page in another tab needs another version.
      database.onversionchange = () => database.close();
      const store = new Store(database);
      await store.#forgetOld();
      return store;
    } catch (error) {
      console.info(`conversations are not kept: ${error}`);
      return null;
    }
  }

  constructor(database) {
    this.#database = database;
    const known = sessionStorage.getItem(TAB);
    if (known) this.select(known);
    else this.begin();
  }

  /** The id of this tab's conversation. */
  get current() {
    return this.#conversation;
  }

  /** Go on with another conversation. */
  select(id) {
    this.#conversation = id;
    sessionStorage.setItem(TAB, id);
  }

  /** Begin a new conversation. */
  begin() {
    this.select(`${Date.now()}-${Math.random()}`);
  }

  /** @returns {Promise<{id: string, title: string, saved: number}[]>} all conversations, the newest first */
  async list() {
    const conversations = this.#database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS);
    const [ids, values] = await Promise.all([finished(conversations.getAllKeys()), finished(conversations.getAll())]);
    return ids.map((id, at) => ({ id, ...values[at] })).sort((a, b) => b.saved - a.saved);
  }

  /** @returns {Promise<object[]>} what was saved of this tab's conversation, in its order */
  async load() {
    const transaction = this.#database.transaction([EXCHANGES, CONVERSATIONS]);
    const known = finished(transaction.objectStore(CONVERSATIONS).get(this.#conversation));
    const exchanges = await finished(transaction.objectStore(EXCHANGES).getAll(all(this.#conversation)));
    this.#saved = (await known)?.saved;
    return exchanges;
  }

  /** Keep an exchange, `{order, words, ...}`, in the place of the one of that order; in a copy if another tab went on. */
  async save(exchange) {
    try {
      let id = this.#conversation;
      await this.#change((exchanges, conversations) => {
        conversations.get(id).onsuccess = ({ target: { result: known } }) => {
          const saved = Date.now();
          if (this.#conversation === id) {
            if (known && known.saved !== this.#saved) {
              const earlier = exchanges.getAll(IDBKeyRange.bound([id, 0], [id, exchange.order], false, true));
              earlier.onsuccess = () => earlier.result.forEach((each) => exchanges.put(each, [id, each.order]));
              this.begin();
              id = this.#conversation;
            }
            this.#saved = saved;
          }
          exchanges.put(exchange, [id, exchange.order]);
          conversations.put({ title: known?.title || exchange.words.slice(0, 80), saved }, id);
        };
      });
      await this.#forgetOld();
    } catch (error) {
      // No room: what is on the page is still there until it is closed.
      console.info(`an exchange is not kept: ${error}`);
    }
  }

  delete(order) {
    return this.#change((exchanges) => exchanges.delete([this.#conversation, order]));
  }

  /** Delete a conversation. */
  forget(id) {
    return this.#change((exchanges, conversations) => {
      exchanges.delete(all(id));
      conversations.delete(id);
    });
  }

  /** Not this tab's own, however old it is. */
  async #forgetOld() {
    const others = (await this.list()).filter(({ id }) => id !== this.#conversation);
    const old = others.filter(({ saved }, at) => at >= KEPT - 1 || saved < Date.now() - KEPT_MS);
    for (const { id } of old) await this.forget(id);
  }

  /** @returns {Promise<void>} resolves once the change is committed: a reload right after it does not undo it */
  #change(make) {
    const transaction = this.#database.transaction([EXCHANGES, CONVERSATIONS], "readwrite");
    make(transaction.objectStore(EXCHANGES), transaction.objectStore(CONVERSATIONS));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function all(id) {
  return IDBKeyRange.bound([id, 0], [id, Infinity]);
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject("another tab has an older page open");
  });
}
