import { Chart } from "/page/chart.js";
import { $, el, show } from "/page/dom.js";
import { count, counted, duration, median } from "/page/format.js";
import { complete } from "/page/stream.js";

const LINES = ["cached", "uncached"];
const TITLES = ["With the cache", "Without"];
const EDGE = 20; // tokens at either end that are compared

/** The same text with the cache and without. */
export class RaceView {
  model = null;
  #api;
  #chart = new Chart($("race-chart"), LINES);
  #lanes = TITLES.map((title, i) => new Lane(title, LINES[i]));
  #running = null;

  constructor(api) {
    this.#api = api;
    $("race-lanes").replaceChildren(...this.#lanes.map((lane) => lane.element));
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#race();
    });
    $("race-stop").addEventListener("click", () => this.#running?.abort());
  }

  enter() {}

  leave() {} // a race goes on

  async #race() {
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    $("race-stop").disabled = false;
    show($("race-error"), null);
    for (const lane of this.#lanes) lane.clear();
    const body = {
      prompt: $("race-prompt").value,
      max_tokens: Number($("race-max").value),
      temperature: 0.8,
      top_k: 40, // without the thousands of tokens at the end, one of which rounding may swap
      seed: crypto.getRandomValues(new Uint32Array(1))[0], // the same text in both lanes
      ignore_eos: true, // and of the same length
      logprobs: 0,
    };
    try {
      // The length of the prompt, so that the axis is right from the start.
      const { count: n } = await this.#api.post(
        "/tokenize",
        { prompt: body.prompt },
        running.signal,
      );
      $("race-figure").hidden = $("race-lanes").hidden = false;
      this.#chart.clear(n, n + body.max_tokens);
      const results = [];
      for (const i of [0, 1]) {
        $("race-status").textContent = `${TITLES[i]}…`;
        results.push(await this.#run(i, n, { ...body, use_cache: i === 0 }, running.signal));
      }
      $("race-status").textContent = verdict(results, this.#lanes);
      this.#chart.describe(description(this.#lanes));
    } catch (error) {
      if (this.#running !== running) return;
      show($("race-error"), error);
      $("race-status").textContent = error.name === "AbortError" ? "Stopped." : "";
    } finally {
      if (this.#running === running) {
        this.#running = null;
        $("race-stop").disabled = true;
      }
    }
  }

  async #run(i, first, body, signal) {
    const lane = this.#lanes[i];
    let position = first;
    const pieces = (new_) => {
      for (const piece of new_) {
        // The first token comes with the whole prompt, in both lanes.
        if (position > first) this.#chart.add(i, position, piece.ms);
        lane.add(piece);
        position += 1;
      }
    };
    const result = await complete(this.#api, body, signal, { pieces });
    lane.finish(result);
    return result;
  }
}

/** One of the two: its text as it grows, and what it took. */
class Lane {
  times = []; // milliseconds of each token but the first
  ids = [];
  #text = el("p", { class: "lane-text" });
  #facts = el("dl", { class: "facts" });

  constructor(title, kind) {
    const heading = el("h2", { class: kind }, title);
    this.element = el("article", { class: "lane" }, heading, this.#facts, this.#text);
    this.clear();
  }

  clear() {
    this.times = [];
    this.ids = [];
    this.#text.replaceChildren();
    this.#show({ tokens: "0", "ms per token": "–", "rows computed": "–", total: "–" });
  }

  add(piece) {
    if (this.ids.length) this.times.push(piece.ms);
    this.ids.push(piece.id);
    this.#text.append(piece.text);
    const now = this.times.length ? median(this.times.slice(-EDGE)).toFixed(1) : "–";
    const total = duration(this.times.reduce((sum, ms) => sum + ms, 0));
    this.#show({
      tokens: count(this.ids.length),
      "ms per token": now,
      "rows computed": "…",
      total,
    });
  }

  finish({ usage, timings, total }) {
    this.#show({
      tokens: count(usage.completion_tokens),
      "ms per token": median(this.times).toFixed(1),
      "rows computed": count(timings.rows_computed),
      total: duration(total),
      "rows reused": count(timings.rows_reused),
    });
  }

  /** Median time of a token near the start and near the end. */
  edges() {
    return [median(this.times.slice(0, EDGE)), median(this.times.slice(-EDGE))];
  }

  #show(facts) {
    const parts = Object.entries(facts).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)),
    );
    this.#facts.replaceChildren(...parts);
  }
}

function verdict([cached, uncached], lanes) {
  const parting = lanes[0].ids.findIndex((id, i) => id !== lanes[1].ids[i]);
  const same =
    parting < 0
      ? "The same text"
      : `The same ${counted(parting, "token")}, then two that were nearly as likely`;
  const rows = uncached.timings.rows_computed / Math.max(cached.timings.rows_computed, 1);
  const time = uncached.total / cached.total;
  return (
    `${same}. With the cache ${counted(cached.timings.rows_computed, "row")} in ` +
    `${duration(cached.total)}; without, ${counted(uncached.timings.rows_computed, "row")}: ` +
    `${count(Math.round(rows))} times as many, and it took ${time.toFixed(1)} times as long.`
  );
}

function description(lanes) {
  return lanes
    .map((lane, i) => {
      const [start, end] = lane.edges();
      return `${TITLES[i]}: ${duration(start)} per token at first, ${duration(end)} at the end`;
    })
    .join(". ");
}
