// Conversations in the browser's database. Where there is none, they last until the page is left.

const NAME = "headroom";
const TITLES = "titles"; // {id, title, created, updated}: what the list shows
const CONVERSATIONS = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore(TITLES, { keyPath: "id" });
      opening.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    };
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
    opening.onblocked = () => reject(new Error("The database is in use."));
  });
}

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const complete = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser refused to store it."));
  });

const titleRow = ({ id, title, created, updated }) => ({ id, title, created, updated });

class DatabaseStore {
  lasting = true;

  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close();
  }

  async list() {
    return done(this.database.transaction(TITLES).objectStore(TITLES).getAll());
  }

  async load(id) {
    return done(this.database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS).get(id));
  }

  async save(conversation) {
    const writing = this.database.transaction([TITLES, CONVERSATIONS], "readwrite");
    writing.objectStore(TITLES).put(titleRow(conversation));
    writing.objectStore(CONVERSATIONS).put(conversation);
    await complete(writing);
  }

  async remove(id) {
    const writing = this.database.transaction([TITLES, CONVERSATIONS], "readwrite");
    writing.objectStore(TITLES).delete(id);
    writing.objectStore(CONVERSATIONS).delete(id);
    await complete(writing);
  }

  /** Return the ids of the conversations for which `test` is true; one is read at a time. */
  async find(test) {
    const found = new Set();
    const reading = this.database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS).openCursor();
    await new Promise((resolve, reject) => {
      reading.onerror = () => reject(reading.error);
      reading.onsuccess = () => {
        const cursor = reading.result;
        if (!cursor) return resolve();
        if (test(cursor.value)) found.add(cursor.value.id);
        cursor.continue();
      };
    });
    return found;
  }
}

class MemoryStore {
  lasting = false;
  kept = new Map();

  async list() {
    return [...this.kept.values()].map(titleRow);
  }

  async load(id) {
    return this.kept.get(id);
  }

  async save(conversation) {
    this.kept.set(conversation.id, structuredClone(conversation));
  }

  async remove(id) {
    this.kept.delete(id);
  }

  async find(test) {
    return new Set([...this.kept.values()].filter(test).map((conversation) => conversation.id));
  }
}

/** Return where conversations are kept. */
export async function openStore() {
  try {
    return new DatabaseStore(await open());
  } catch {
    return new MemoryStore();
  }
}

/** Return a small value that the browser keeps for this page. */
export function remembered(name, otherwise) {
  try {
    const text = localStorage.getItem(`headroom.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keep a small value; a browser that keeps none is no error. */
export function remember(name, value) {
  try {
    localStorage.setItem(`headroom.${name}`, JSON.stringify(value));
  } catch {
    // It holds until the page is left.
  }
}
