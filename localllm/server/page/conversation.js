// A conversation, and how it is kept.
//
// One save is under way at a time, and sends the turns that have changed since the last one. A page
// that goes away sends what is not saved yet, and leaves it in its tab for a page that comes after
// it. The server compares the two: see `_join` in conversations_api.py.

const KEPT = "localllm-unsaved", PATH = "/page/conversations";
// Browsers send no more for a page that is gone: 64 KiB, headers included (Fetch, "keepalive").
const MOST_LEAVING_BYTES = 60_000;

export class Conversation {
  id = null;
  revision = 0;
  title = "";
  system = "";
  turns = [];
  #draft = randomName();
  #saved = []; // the turns as the server has them, as JSON
  #savedHead = "";
  #isWanted = false;
  #work = null;

  static async load(server, id) {
    const found = Object.assign(new Conversation(), await server.json(`${PATH}/${id}`));
    found.system ||= "";
    found.#noteSaved(found.turns.map(asText), found.#head());
    return found;
  }

  // What a page of this tab had when it went away: only its id, if all was saved.
  static takeLeft() {
    const left = sessionStorage.getItem(KEPT);
    sessionStorage.removeItem(KEPT);
    if (!left) return null;
    const { draft, ...rest } = JSON.parse(left);
    const found = Object.assign(new Conversation(), rest);
    found.#draft = draft ?? found.#draft;
    return found;
  }

  get isSaved() {
    const turns = this.turns.map(asText);
    return this.#head() === this.#savedHead && turns.length === this.#saved.length &&
      turns.every((turn, place) => turn === this.#saved[place]);
  }

  // Save it, again if it changes meanwhile. `told`: what to do with what the server says.
  save(server, told) {
    if (!server.token) return null;
    this.#isWanted = true;
    this.#work ??= this.#saveAll(server, told).finally(() => { this.#work = null; });
    return this.#work;
  }

  // The page goes away, perhaps while a save is under way.
  leave(server) {
    if (!this.turns.length) return;
    const { id, revision, title, system, turns, isSaved } = this;
    const left = isSaved ? { id } : { id, revision, title, system, turns, draft: this.#draft };
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(left));
    } catch { /* too much for a tab: what is saved has to do */ }
    if (isSaved || !server.token) return;
    const whole = this.#body(0);
    const body = isShort(whole) || this.id === null ? whole : this.#body(this.#numSame());
    if (isShort(body)) server.post(this.#path, body, { keepalive: true }).catch(() => {});
  }

  get #path() {
    return this.id === null ? PATH : `${PATH}/${this.id}`;
  }

  async #saveAll(server, told) {
    while (this.#isWanted) {
      this.#isWanted = false;
      try {
        told(await this.#saveOnce(server), null);
      } catch (error) {
        told(null, error);
      }
    }
  }

  async #saveOnce(server) {
    const turns = this.turns.map(asText), head = this.#head(), isNew = this.id === null;
    const answer = await this.#send(server, this.#body(isNew ? 0 : this.#numSame()));
    this.id = answer.id;
    this.revision = answer.revision;
    this.#noteSaved(turns, head);
    return { isNew: isNew || answer.apart, isApart: answer.apart };
  }

  async #send(server, body) {
    try {
      return await server.post(this.#path, body);
    } catch (error) {
      if (error.status === 404 && this.id !== null) { // deleted elsewhere: it goes on as a new one
        this.id = null;
        this.#draft = randomName();
      } else if (error.status !== 409) throw error;
      return server.post(this.#path, this.#body(0));
    }
  }

  #body(keep) {
    const model = this.turns.at(-1)?.model ?? "";
    const turns = this.turns.slice(keep).map(shownOf);
    const told = { model, system: this.system || null, title: this.title.slice(0, 300), turns };
    return this.id === null ? { ...told, draft: this.#draft } : { ...told, keep, revision: this.revision };
  }

  #numSame() {
    let same = 0;
    while (same < this.#saved.length && same < this.turns.length &&
      asText(this.turns[same]) === this.#saved[same]) same += 1;
    return same;
  }

  #head() {
    return JSON.stringify([this.system, this.title]);
  }

  #noteSaved(turns, head) {
    this.#saved = turns;
    this.#savedHead = head;
  }
}

function shownOf({ question, answer, thinking, finish_reason, model, figures }) {
  return { question, answer, thinking, finish_reason, model, figures };
}

function asText(turn) {
  return JSON.stringify(shownOf(turn));
}

function isShort(body) {
  return new Blob([JSON.stringify(body)]).size <= MOST_LEAVING_BYTES;
}

function randomName() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (each) => each.toString(36)).join("-");
}
