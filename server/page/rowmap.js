import { colour } from "/page/dom.js";

const STATES = ["free", "running", "idle"];
const HUES = 8; // --owner-0 and on, in the style sheet
const SHARED = 0.68; // of the brightness of a row of one holder
const [LEAST, MOST] = [2, 14]; // pixels that a cell is wide
const ASPECT = 0.42; // height of the map to its width, if cells may be so large

/**
 * The pool on a canvas: one pixel per row, enlarged by the browser. Only lines in which something
 * has changed are drawn again.
 */
export class RowMap {
  #canvas;
  #context;
  #total = 0;
  #kinds = new Uint8Array(); // number of the state; behind them, hue of the session
  #holders = new Uint16Array();
  #owners = [""]; // names, by number
  #hues = new Map(); // session to the number of its colour
  #owner = new Uint32Array();
  #columns = 1;
  #image = null;
  #palette = [];
  #dirty = [Infinity, -1]; // first and last line to draw
  #asked = 0;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
    new ResizeObserver(() => this.#layOut()).observe(canvas.parentElement);
  }

  get total() {
    return this.#total;
  }

  /** The colour of a session, dealt out in turn as they come: it stays while the page does. */
  hue(session) {
    if (!this.#hues.has(session)) this.#hues.set(session, this.#hues.size % HUES);
    return this.#hues.get(session);
  }

  /** @param {{start: number, n: number, state: string, owner: string|null, holders: number}[]} runs */
  update(total, runs) {
    if (total !== this.#total) {
      this.#total = total;
      this.#kinds = new Uint8Array(total);
      this.#holders = new Uint16Array(total);
      this.#owner = new Uint32Array(total);
      this.#layOut();
    }
    // Runs are few and long, or the pool is full of single rows: either way it is one pass.
    const numbers = new Map(this.#owners.map((name, i) => [name, i]));
    for (const { start, n, state, owner, holders } of runs) {
      const named = state === "idle" && owner !== null;
      const end = start + n;
      const name = owner ?? "";
      if (!numbers.has(name)) numbers.set(name, this.#owners.push(name) - 1);
      this.#kinds.fill(named ? STATES.length + this.hue(owner) : STATES.indexOf(state), start, end);
      this.#holders.fill(Math.min(holders, 65535), start, end);
      this.#owner.fill(numbers.get(name), start, end);
      this.#soil(start, end);
    }
  }

  /** Read the colours of the style sheet again. */
  recolour() {
    const names = STATES.map((state) => `--${state}`);
    for (let i = 0; i < HUES; i++) names.push(`--owner-${i}`);
    names.push("--paper"); // what is no row, at the end of the last line
    this.#palette = names.map(colour);
    this.#soil(0, this.#total);
  }

  /** The row under a point of the page, or null. */
  rowAt(clientX, clientY) {
    const box = this.#canvas.getBoundingClientRect();
    const column = Math.floor(((clientX - box.left) / box.width) * this.#columns);
    const line = Math.floor(((clientY - box.top) / box.height) * this.#canvas.height);
    const row = line * this.#columns + column;
    return column >= 0 && column < this.#columns && row >= 0 && row < this.#total ? row : null;
  }

  /** Where the run before or after that of `row` begins. */
  neighbour(row, way) {
    const same = (a, b) =>
      this.#kinds[a] === this.#kinds[b] &&
      this.#owner[a] === this.#owner[b] &&
      this.#holders[a] === this.#holders[b];
    let next = row;
    while (next + way >= 0 && next + way < this.#total && same(next + way, row)) next += way;
    next = Math.min(Math.max(next + way, 0), this.#total - 1);
    while (next > 0 && same(next - 1, next)) next -= 1;
    return next;
  }

  /** @returns {{state: string, owner: string, holders: number}} */
  describe(row) {
    const kind = this.#kinds[row];
    return {
      state: STATES[kind] ?? "idle",
      owner: this.#owners[this.#owner[row]],
      holders: this.#holders[row],
    };
  }

  /** As many columns as make whole pixels of the cells and a wide map of the whole. */
  #layOut() {
    const width = Math.floor(this.#canvas.parentElement.clientWidth);
    if (!width || !this.#total) return;
    const ideal = Math.floor(Math.sqrt((width * width * ASPECT) / this.#total));
    const cell = Math.min(Math.max(ideal, LEAST), MOST);
    const columns = Math.min(Math.floor(width / cell), this.#total);
    const lines = Math.ceil(this.#total / columns);
    this.#canvas.style.width = `${columns * cell}px`;
    this.#canvas.style.height = `${lines * cell}px`;
    if (this.#canvas.width === columns && this.#canvas.height === lines && this.#image) return;
    this.#columns = columns;
    this.#canvas.width = columns;
    this.#canvas.height = lines;
    this.#image = this.#context.createImageData(columns, lines);
    this.recolour();
  }

  #soil(start, end) {
    if (end <= start) return;
    this.#dirty[0] = Math.min(this.#dirty[0], Math.floor(start / this.#columns));
    this.#dirty[1] = Math.max(this.#dirty[1], Math.floor((end - 1) / this.#columns));
    this.#asked ||= requestAnimationFrame(() => {
      this.#asked = 0;
      this.#draw();
    });
  }

  #draw() {
    if (!this.#image) return;
    const [first, last] = this.#dirty;
    this.#dirty = [Infinity, -1];
    const start = first * this.#columns;
    const end = Math.min((last + 1) * this.#columns, this.#image.width * this.#image.height);
    const pixels = this.#image.data;
    for (let row = start, at = 4 * start; row < end; row++, at += 4) {
      const [r, g, b] = this.#palette[row < this.#total ? this.#kinds[row] : STATES.length + HUES];
      const light = this.#holders[row] > 1 ? SHARED : 1;
      pixels[at] = r * light;
      pixels[at + 1] = g * light;
      pixels[at + 2] = b * light;
      pixels[at + 3] = 255;
    }
    this.#context.putImageData(this.#image, 0, 0, 0, first, this.#columns, last - first + 1);
  }
}
