import { $, el, onSchemeChange, show } from "/page/dom.js";
import { bytes, count, counted, percent } from "/page/format.js";
import { RowMap } from "/page/rowmap.js";

const RETRY = 2000; // milliseconds until a stream that broke is opened again
const COLUMNS = ["Tokens", "Rows", "Shared", "Size", "Turns", "Reused"]; // as in the table's head
const STORIES = [
  "Once upon a time there was a cat who",
  "Once upon a time there was a cow who",
  "Once upon a time there was a king who",
  "One day Tom and Sue went to",
  "One day Tom and Sue lost",
  "The little bird was sad because",
];

/** The pool of rows and the sessions, live. */
export class CacheView {
  model = null;
  #api;
  #map = new RowMap($("cache-rows"));
  #listening = null; // an AbortController
  #cell = 0;

  constructor(api) {
    this.#api = api;
    onSchemeChange(() => this.#map.recolour());
    const canvas = $("cache-rows");
    canvas.addEventListener("pointermove", (event) => {
      const row = this.#map.rowAt(event.clientX, event.clientY);
      if (row !== null) this.#point(row);
    });
    canvas.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!way || !this.#map.total) return;
      event.preventDefault();
      this.#point(this.#map.neighbour(this.#cell, way));
    });
    $("cache-reset").addEventListener("click", () => this.#act(() => api.post("/v1/cache/reset")));
    $("cache-fill").addEventListener("click", () => this.#act(() => this.#fill()));
  }

  enter() {
    if (!this.#listening) this.#listen();
  }

  leave() {
    this.#listening?.abort();
    this.#listening = null;
  }

  async #listen() {
    const listening = new AbortController();
    this.#listening = listening;
    const { signal } = listening;
    while (!signal.aborted) {
      try {
        const events = this.#api.stream("GET", "/v1/cache/events", undefined, signal);
        for await (const batch of events) {
          show($("cache-error"), null);
          for (const now of batch) this.#show(now);
        }
      } catch (error) {
        show($("cache-error"), error);
        if (error.name === "NoKey") this.leave();
      }
      if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }

  #show(now) {
    this.#map.update(now.rows.total, now.runs);
    const { rows, totals } = now;
    const share = totals?.prompt_tokens ? totals.rows_reused / totals.prompt_tokens : 0;
    const numbers = {
      rows: [count(rows.total), `${bytes(now.row_bytes)} each`],
      running: [count(rows.running), "held by requests"],
      idle: [count(rows.idle), "kept for later"],
      shared: [count(rows.shared), "held by several"],
      used: [bytes(now.bytes), `of ${bytes(rows.total * now.row_bytes)}`],
      // null where callers have keys of their own: these numbers count what everyone does.
      ...(totals && {
        reused: [count(totals.rows_reused), `${percent(share)} of prompt tokens`],
        computed: [count(totals.rows_computed), "rows since the start"],
        evicted: [count(totals.rows_evicted), counted(totals.preemptions, "preemption")],
      }),
    };
    const cells = Object.entries(numbers).map(([name, [value, note]]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note))),
    );
    $("cache-numbers").replaceChildren(...cells);
    const state = ["free", "running", "idle"].map((name) => `${count(rows[name])} ${name}`);
    $("cache-rows").setAttribute("aria-label", `${count(rows.total)} rows: ${state.join(", ")}`);
    this.#list(now.sessions, now.n_sessions);
  }

  /** Those that were used last. While a session is one of them its row of the table is kept, for
   * a button must not vanish in a click. */
  #list(sessions, n) {
    $("cache-more").hidden = sessions.length === n;
    $("cache-more").textContent = `The last ${count(sessions.length)} of ${count(n)}.`;
    $("cache-none").hidden = sessions.length > 0;
    $("cache-scroll").hidden = sessions.length === 0;
    const body = $("cache-sessions");
    const there = new Map([...body.rows].map((line) => [line.dataset.id, line]));
    for (const session of sessions) {
      const line = there.get(session.id) ?? body.appendChild(this.#line(session.id));
      there.delete(session.id);
      const { tokens, rows, shared_rows, turns, reused } = session;
      const cells = [tokens, rows, shared_rows, bytes(session.bytes), turns, reused];
      cells.forEach((cell, i) => {
        const words = typeof cell === "number" ? count(cell) : cell;
        if (line.cells[i + 1].textContent !== words) line.cells[i + 1].textContent = words;
      });
    }
    for (const gone of there.values()) gone.remove();
  }

  #line(id) {
    const path = `/v1/sessions/${encodeURIComponent(id)}`;
    const button = (words, act) =>
      el(
        "button",
        {
          type: "button",
          class: "quiet",
          "aria-label": `${words} ${id}`,
          onclick: () => this.#act(act),
        },
        words,
      );
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.setProperty("--swatch", `var(--owner-${this.#map.hue(id)})`);
    return el(
      "tr",
      { "data-id": id },
      el("th", { scope: "row" }, swatch, id),
      ...COLUMNS.map((name) => el("td", { class: "n", "data-label": name })),
      el(
        "td",
        { class: "acts" },
        button("Rewind", () => this.#rewind(path)),
        button("Fork", () => this.#api.post(`${path}/fork`)),
        button("Delete", () => confirm(`Delete ${id}?`) && this.#api.delete(path)),
      ),
    );
  }

  /** Take back the last turn. */
  async #rewind(path) {
    const { turn_ends } = await this.#api.get(path);
    if (turn_ends.length) await this.#api.post(`${path}/rewind`, { turn: turn_ends.length - 1 });
  }

  /** Something to look at: six stories, of which some begin alike. */
  async #fill() {
    const calls = STORIES.map((prompt) =>
      this.#api.post("/v1/completions", { prompt, max_tokens: 100, temperature: 0.9 }),
    );
    await Promise.all(calls);
  }

  async #act(act) {
    try {
      show($("cache-error"), null);
      await act();
    } catch (error) {
      show($("cache-error"), error);
    }
  }

  #point(row) {
    this.#cell = row;
    const { state, owner, holders } = this.#map.describe(row);
    const parts = [`Row ${count(row)}: ${state}`];
    if (owner) parts.push(owner);
    if (holders > 1) parts.push(`shared by ${holders}`);
    $("cache-cell").textContent = parts.join(", ");
  }
}
