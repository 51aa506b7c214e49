import { svg } from "/page/dom.js";
import { count, median } from "/page/format.js";

const HEIGHT = 280;
const MARGIN = { left: 48, right: 92, top: 14, bottom: 38 };
const WINDOW = 15; // points in the moving median

/** Lines over a text's positions, drawn by hand: faint points, and their moving median. */
export class Chart {
  #svg;
  #names;
  #points;
  #range = [0, 1]; // positions
  #asked = 0;

  /** @param {SVGElement} place @param {string[]} names of the lines; a class of the style sheet, too */
  constructor(place, names) {
    this.#svg = place;
    this.#names = names;
    this.#points = names.map(() => []);
    new ResizeObserver(() => this.#ask()).observe(place);
  }

  /** Begin anew, with room for positions from `first` to `last`. */
  clear(first, last) {
    this.#points = this.#names.map(() => []);
    this.#range = [first, Math.max(last, first + 1)];
    this.#ask();
  }

  add(line, x, y) {
    this.#points[line].push([x, y]);
    this.#ask();
  }

  /** @param {string} words what the chart shows, for those who do not see it */
  describe(words) {
    this.#svg.setAttribute("aria-label", words);
  }

  #ask() {
    if (this.#asked) return;
    this.#asked = requestAnimationFrame(() => {
      this.#asked = 0;
      this.#draw();
    });
  }

  #draw() {
    const width = this.#svg.clientWidth;
    if (!width) return; // nobody looks
    const [first, last] = this.#range;
    const lines = this.#points.map(smoothed);
    const highest = Math.max(...lines.flat().map(([, y]) => y), 0) * 1.2;
    const ticks = niceTicks(highest || 1);
    const top = ticks.at(-1);
    const right = width - MARGIN.right;
    const x = (at) => MARGIN.left + ((at - first) / (last - first)) * (right - MARGIN.left);
    // What is above the axis is shown at its end: a pause of the machine must not flatten the rest.
    const y = (ms) =>
      HEIGHT - MARGIN.bottom - (Math.min(ms, top) / top) * (HEIGHT - MARGIN.bottom - MARGIN.top);

    const parts = [];
    for (const tick of ticks) {
      parts.push(
        svg("line", { class: "rule", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }),
        text(MARGIN.left - 8, y(tick) + 4, "end", count(tick)),
      );
    }
    for (const at of niceTicks(last).filter((tick) => tick >= first && tick <= last)) {
      parts.push(text(x(at), HEIGHT - MARGIN.bottom + 18, "middle", count(at)));
    }
    parts.push(text((MARGIN.left + right) / 2, HEIGHT - 2, "middle", "tokens before it"));
    lines.forEach((line, i) => {
      if (!line.length) return;
      const dots = this.#points[i].map(([a, b]) => `M${x(a).toFixed(1)} ${y(b).toFixed(1)}h0`);
      const path = line.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L");
      const [endX, endY] = line.at(-1);
      const name = this.#names[i];
      parts.push(
        svg("path", { class: `dots ${name}`, d: dots.join("") }),
        svg("path", { class: `line ${name}`, d: `M${path}` }),
        text(x(endX) + 8, y(endY) + 4, "start", name, `label ${name}`),
      );
    });
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#svg.replaceChildren(...parts);
  }
}

function text(x, y, anchor, words, kind = "tick") {
  return svg("text", { class: kind, x, y, "text-anchor": anchor }, words);
}

/** The moving median: what a token takes, without the machine's other business. */
function smoothed(points) {
  const half = WINDOW >> 1;
  return points.map(([x], i) => {
    const near = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, median(near.map(([, y]) => y))];
  });
}

/** Round numbers from 0 to `highest` or a little above it, about `n` steps. */
export function niceTicks(highest, n = 5) {
  const rough = highest / n;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * magnitude).find((s) => s >= rough);
  const steps = Math.ceil(highest / step - 1e-9);
  return Array.from({ length: steps + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}
