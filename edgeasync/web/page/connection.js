// Everything that goes over the network: the feed of updates, single requests, and the token.

const TOKEN_KEY = "edgeasync-token";

/** Longest wait before another attempt; the page is alive again within 3 s of the hub's return. */
const RETRY_MS_MAX = 2000;

/** The hub sends an update every second. After this long without one, the connection is dead. */
const SILENCE_MS = 15_000;

/** A hidden page stops following the hub after this long, and resumes once it is visible. */
const HIDDEN_MS = 60_000;

/** The hub's refusal, in its own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.needsToken = status === 401 || status === 403;
  }
}

/** @typedef {"connecting" | "live" | "disconnected" | "paused" | "refused"} State */

export class Connection {
  /**
   * @param {object} handlers
   * @param {(update: any) => void} handlers.onUpdate called with each FeedUpdate
   * @param {(state: State, words?: string) => void} handlers.onState with the hub's words if it refuses
   * @param {(words: string) => Promise<boolean>} handlers.askToken asks for a token; false: not now
   */
  constructor({ onUpdate, onState, askToken }) {
    this.onUpdate = onUpdate;
    this.onState = onState;
    this.askToken = askToken;
    this.failures = 0;
    this.isLive = false;
    this.abort = null;
    this.wake = null;
    this.hiddenTimer = 0;
    addEventListener("online", () => this.wake?.());
    document.addEventListener("visibilitychange", () => this.visibility());
  }

  get token() {
    return sessionStorage.getItem(TOKEN_KEY) ?? "";
  }

  set token(text) {
    if (text) sessionStorage.setItem(TOKEN_KEY, text);
    else sessionStorage.removeItem(TOKEN_KEY);
  }

  /**
   * Send a request. Throws `Refusal` for an answer that is an error, and `TypeError` without an answer.
   * @param {string} path
   * @param {{method?: string, body?: object, signal?: AbortSignal}} options
   */
  async request(path, { method = "GET", body, signal } = {}) {
    const headers = {};
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    if (body) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method,
      headers,
      signal,
      body: body && JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
    });
    if (!answer.ok) {
      const fallback = `the hub answered with ${answer.status} ${answer.statusText}`;
      const said = await answer.json().catch(() => ({}));
      throw new Refusal(answer.status, String(said.error ?? fallback));
    }
    return answer;
  }

  /**
   * Send a request, and ask for a token if it needs one. Returns null if the user has no token.
   * @param {string} path
   * @param {{method?: string, body?: object}} options
   */
  async requestWithToken(path, options = {}) {
    for (;;) {
      try {
        return await this.request(path, options);
      } catch (error) {
        if (!error.needsToken) throw error;
        if (!(await this.askToken(error.message))) return null;
      }
    }
  }

  /** Follow the hub until the page is closed. */
  async follow() {
    for (;;) {
      let refusal = "";
      try {
        await this.stream();
      } catch (error) {
        if (error.needsToken) {
          this.onState("refused");
          await this.askToken(error.message);
          continue;
        }
        if (error instanceof Refusal) refusal = error.message;
      }
      if (document.hidden && this.abort?.signal.reason === "hidden") {
        this.onState("paused");
        await this.pause(Infinity);
        continue;
      }
      this.onState("disconnected", refusal);
      const limit = Math.min(RETRY_MS_MAX, 250 * 2 ** this.failures);
      this.failures += 1;
      await this.pause(limit * (0.75 + 0.25 * Math.random())); // so that 50 pages do not return at once
    }
  }

  /** Read updates until the stream ends or breaks. */
  async stream() {
    const abort = new AbortController();
    this.abort = abort;
    let watch = setTimeout(() => abort.abort("silent"), SILENCE_MS);
    try {
      const answer = await this.request("api/feed", { signal: abort.signal });
      const reader = answer.body.getReader();
      const decoder = new TextDecoder();
      let line = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort("silent"), SILENCE_MS);
        const parts = decoder.decode(value, { stream: true }).split("\n");
        for (const part of parts.slice(0, -1)) {
          this.receive(line + part);
          line = "";
        }
        line += parts[parts.length - 1];
      }
    } finally {
      this.isLive = false;
      clearTimeout(watch);
      abort.abort("ended");
    }
  }

  receive(line) {
    if (!line) return;
    try {
      this.onUpdate(JSON.parse(line));
    } catch (error) {
      console.error(error); // and a new stream starts with a whole update
      throw error;
    }
    this.failures = 0;
    this.isLive = true;
    this.onState("live");
  }

  /** Wait, but no longer than until something wakes the connection. */
  async pause(limit) {
    await new Promise((done) => {
      const timer = limit === Infinity ? 0 : setTimeout(done, limit);
      this.wake = () => {
        clearTimeout(timer);
        done();
      };
    });
    this.wake = null;
  }

  visibility() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) this.hiddenTimer = setTimeout(() => this.abort?.abort("hidden"), HIDDEN_MS);
    else this.wake?.();
  }
}
