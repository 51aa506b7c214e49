import { events } from "/page/sse.js";

/** An answer other than success, in the server's own words. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {string|null} code */
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server's API. Keeps the key, and asks for it when the server does. */
export class Api {
  #key = null;
  #asking = null;
  #askForKey;

  /** @param {(wrong: boolean) => Promise<string>} askForKey rejects if there is none to be had */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  /** Whether a key is in use. */
  get keyed() {
    return this.#key !== null;
  }

  /** @returns {Promise<any>} */
  async get(path, signal) {
    return (await this.#fetch("GET", path, undefined, signal)).json();
  }

  /** @returns {Promise<any>} */
  async post(path, body = {}, signal) {
    return (await this.#fetch("POST", path, body, signal)).json();
  }

  /** @returns {Promise<any>} */
  async delete(path) {
    return (await this.#fetch("DELETE", path)).json();
  }

  /**
   * The events of a stream, parsed, as they come together. Aborting the signal, or leaving the
   * loop, hangs up.
   *
   * @returns {AsyncGenerator<any[]>}
   */
  async *stream(method, path, body, signal) {
    const response = await this.#fetch(method, path, body, signal);
    for await (const batch of events(response.body)) {
      const found = batch.filter((data) => data !== "[DONE]").map((data) => JSON.parse(data));
      const failed = found.findIndex((event) => event.error);
      yield failed < 0 ? found : found.slice(0, failed);
      if (failed >= 0) {
        const { message, code } = found[failed].error;
        throw new ApiError(500, message, code);
      }
    }
  }

  async #fetch(method, path, body, signal) {
    for (;;) {
      const used = this.#key;
      const response = await fetch(path, {
        method,
        signal,
        cache: "no-store",
        headers: {
          ...(body !== undefined && { "Content-Type": "application/json" }),
          ...(used && { Authorization: `Bearer ${used}` }),
        },
        body: body === undefined ? undefined : JSON.stringify(body),
      });
      if (response.status !== 401) {
        if (!response.ok) throw await failure(response);
        return response;
      }
      await this.#newKey(used);
    }
  }

  /** One dialog, however many requests were refused. */
  async #newKey(refused) {
    if (this.#key !== refused) return; // somebody has just given one
    this.#asking ??= this.#askForKey(refused !== null).finally(() => (this.#asking = null));
    this.#key = await this.#asking;
  }
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const { message, code } = body.error ?? {};
  return new ApiError(response.status, message ?? `HTTP ${response.status}`, code ?? null);
}
