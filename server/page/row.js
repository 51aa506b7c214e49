import { $, colour, el, onSchemeChange, show, svg } from "/page/dom.js";
import { count, percent, visible } from "/page/format.js";

const LIT = 3; // tokens that are named as those looked at most
const LABELLED = 26; // tokens up to which the grid's lines carry their names

/** What one head looks at: the grid, and the row of one token in it. */
export class RowView {
  model = null;
  #api;
  #seen = null;
  #line = 0; // the row of the grid that is lit
  #asking = null;

  constructor(api) {
    this.#api = api;
    $("row-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#look();
    });
    for (const id of ["row-layer", "row-head"])
      $(id).addEventListener("change", () => this.#look());
    $("row-kind").addEventListener("change", () => this.#draw());
    const grid = $("row-grid");
    grid.addEventListener("pointermove", (event) => this.#pick(this.#lineAt(event)));
    grid.addEventListener("pointerdown", (event) => this.#pick(this.#lineAt(event)));
    grid.addEventListener("keydown", (event) => {
      const way = { ArrowDown: 1, ArrowUp: -1, End: Infinity, Home: -Infinity }[event.key];
      if (!way) return;
      event.preventDefault();
      this.#pick(this.#line + way);
    });
    new ResizeObserver(() => this.#draw()).observe($("row-result"));
    onSchemeChange(() => this.#draw());
  }

  enter() {
    if (!this.#seen) this.#look();
  }

  leave() {}

  async #look() {
    this.#asking?.abort();
    const asking = new AbortController();
    this.#asking = asking;
    const body = {
      prompt: $("row-prompt").value,
      layer: Number($("row-layer").value),
      head: Number($("row-head").value),
    };
    try {
      this.#seen = await this.#api.post("/v1/inspect", body, asking.signal);
      show($("row-error"), null);
    } catch (error) {
      show($("row-error"), error);
      return;
    }
    const { n_layer, n_head, layer, head, tokens } = this.#seen;
    choices($("row-layer"), n_layer, layer);
    choices($("row-head"), n_head, head);
    $("row-result").hidden = false;
    this.#line = tokens.length - 1;
    this.#shapes();
    this.#draw();
    this.#attended();
  }

  #lineAt(event) {
    const box = $("row-grid").getBoundingClientRect();
    return Math.floor(((event.clientY - box.top) / box.height) * this.#seen.tokens.length);
  }

  #pick(line) {
    const picked = Math.min(Math.max(line, 0), this.#seen.tokens.length - 1);
    if (picked === this.#line) return;
    this.#line = picked;
    this.#draw();
    this.#attended();
  }

  /** The grid: a shade for each number, the lit row in the accent colour, nothing ahead. */
  #draw() {
    const canvas = $("row-grid");
    if (!this.#seen || !canvas.clientWidth) return;
    const n = this.#seen.tokens.length;
    const ratio = devicePixelRatio;
    const size = Math.round(canvas.clientWidth * ratio);
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d");
    const [ink, accent, ahead, muted] = ["--ink", "--accent", "--ahead", "--muted"].map((name) =>
      colour(name).join(" "),
    );
    const cell = size / n;
    const gap = cell > 12 * ratio ? ratio : 0;
    const grid = this.#seen[$("row-kind").value];
    const [low, high] = extent(grid);
    for (let i = 0; i < n; i++) {
      const lit = i === this.#line;
      const top = Math.round(i * cell);
      const height = Math.max(Math.round((i + 1) * cell) - top - gap, 1);
      for (let j = 0; j < n; j++) {
        const left = Math.round(j * cell);
        const width = Math.max(Math.round((j + 1) * cell) - left - gap, 1);
        const strength = j > i ? 1 : 0.04 + 0.96 * shade(grid[i][j], low, high);
        context.fillStyle = `rgb(${j > i ? ahead : lit ? accent : ink} / ${strength})`;
        context.fillRect(left, top, width, height);
      }
      if (lit) {
        context.strokeStyle = `rgb(${accent})`;
        context.lineWidth = 1.5 * ratio;
        context.strokeRect(
          ratio,
          top + ratio / 2,
          Math.round((i + 1) * cell) - 2 * ratio,
          height - ratio,
        );
      }
    }
    if (n <= LABELLED) this.#label(context, cell, ratio, [`rgb(${muted})`, `rgb(${accent})`]);
    const { layer, head } = this.#seen;
    const name = this.#line === n - 1 ? "the new token's row" : `row ${this.#line + 1}`;
    $("row-caption").textContent =
      `Layer ${layer + 1}, head ${head + 1}: ${n} rows of up to ${n} numbers, ${name} lit. ` +
      "The upper triangle is what a token may not see.";
  }

  /** Each line's token, where the triangle leaves room for it. */
  #label(context, cell, ratio, [plain, lit]) {
    const size = Math.min(13 * ratio, cell * 0.7);
    context.font = `${size}px ui-monospace, monospace`;
    context.textBaseline = "middle";
    this.#seen.token_strs.forEach((token, i) => {
      const room = context.canvas.width - (i + 1) * cell;
      const name = visible(token);
      if (context.measureText(name).width + 2 * cell * 0.3 > room) return;
      context.fillStyle = i === this.#line ? lit : plain;
      context.fillText(name, (i + 1) * cell + cell * 0.3, (i + 0.5) * cell);
    });
  }

  /** The text, lit by the weights of the row: what it looks at, in words. */
  #attended() {
    const { token_strs, weights, row } = this.#seen;
    const last = this.#line === token_strs.length - 1;
    const shares = last ? row : weights[this.#line];
    const strongest = Math.max(...shares);
    const parts = token_strs.map((token, i) => {
      const text = token.startsWith("bytes:") ? visible(token) : token;
      const kind = i > this.#line ? "ahead" : i === this.#line ? "asks" : "seen";
      const part = el(
        "span",
        { class: kind, title: i > this.#line ? "" : percent(shares[i]) },
        text,
      );
      if (i <= this.#line) part.style.setProperty("--light", (shares[i] / strongest).toFixed(3));
      return part;
    });
    $("row-text").replaceChildren(...parts);
    const best = shares
      .map((share, i) => [share, i])
      .sort((a, b) => b[0] - a[0])
      .slice(0, LIT)
      .map(([share, i]) => `${visible(token_strs[i])} (${percent(share)})`);
    const words = `${visible(token_strs[this.#line])} looks most at ${best.join(", ")}.`;
    $("row-says").textContent = words;
    $("row-grid").setAttribute("aria-label", `The score grid, row ${this.#line + 1} lit. ${words}`);
  }

  #shapes() {
    const { shapes, tokens, weights, row } = this.#seen;
    const lines = shapes.map(({ name, meaning, uncached, cached }) => {
      const kept = cached[0] > 1 || (tokens.length === 1 && "KV".includes(name));
      const size = ([height, width]) => `${count(height)} × ${count(width)}`;
      return el(
        "tr",
        { class: kept ? "kept" : "one" },
        el("th", { scope: "row" }, name),
        el("td", {}, picture(tokens.length, false), size(uncached)),
        el(
          "td",
          {},
          picture(tokens.length, true, kept),
          size(cached),
          kept ? el("small", {}, "kept, one new") : "",
        ),
        el("td", {}, meaning),
      );
    });
    $("row-shapes").tBodies[0].replaceChildren(...lines);
    const gap = Math.max(...row.map((share, i) => Math.abs(share - weights.at(-1)[i])));
    $("row-kept").textContent =
      "Keys and values of the earlier tokens are kept: that is the cache. Their queries are never " +
      "needed again. The new row was computed both ways; the two differ by " +
      `${gap < 1e-5 ? "less than 0.00001" : gap.toFixed(5)}.`;
  }
}

/** A matrix as a stack of rows: those that are computed in colour, those that are kept in grey. */
function picture(n, cached, kept = false) {
  const shown = Math.min(n, 6);
  const rows = Array.from({ length: shown }, (_, i) => {
    const fresh = !cached || i === shown - 1;
    const kind = fresh ? "fresh" : kept ? "stays" : "none";
    return svg("rect", { class: kind, x: 0.5, y: 4 * i + 0.5, width: 21, height: 3 });
  });
  const frame = {
    class: "matrix",
    width: 22,
    height: 24,
    viewBox: "0 0 22 24",
    "aria-hidden": "true",
  };
  return svg("svg", frame, ...rows);
}

function choices(select, n, chosen) {
  if (select.options.length !== n) {
    const options = Array.from({ length: n }, (_, i) => new Option(String(i + 1), String(i)));
    select.replaceChildren(...options);
  }
  select.value = String(chosen);
}

function extent(grid) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of grid) {
    for (const number of row) {
      low = Math.min(low, number);
      high = Math.max(high, number);
    }
  }
  return [low, high];
}

/** From 0 to 1, with the small ones raised: most weights are small, and they differ, too. */
function shade(number, low, high) {
  return high > low ? Math.sqrt((number - low) / (high - low)) : 1;
}
