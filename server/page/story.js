import { el } from "/page/dom.js";
import { duration, percent, visible } from "/page/format.js";

/** A text whose tokens can be looked at, one by one, with pointer, finger or arrow keys. */
export class Story {
  #place;
  #card;
  #pieces = new Map(); // token element to what is known of it
  #current = null;
  #stop = null; // the one that Tab leads to; arrow keys go on from there

  constructor(place, card) {
    this.#place = place;
    this.#card = card;
    for (const kind of ["pointerover", "focusin", "click"])
      place.addEventListener(kind, (event) => this.#look(event.target.closest(".token")));
    place.addEventListener("keydown", (event) => this.#step(event));
  }

  get text() {
    return this.#place.textContent;
  }

  clear(prompt) {
    this.#pieces.clear();
    this.#current = this.#stop = null;
    this.#card.hidden = true;
    this.#place.replaceChildren(el("span", { class: "given" }, prompt));
  }

  /** @param {import("/page/stream.js").Piece[]} pieces */
  add(pieces) {
    for (const piece of pieces) {
      const token = el("span", { class: piece.text ? "token" : "token silent" }, piece.text);
      token.tabIndex = this.#stop ? -1 : 0;
      this.#stop ??= token;
      token.style.setProperty("--surprise", tint(piece.probability).toFixed(3));
      this.#pieces.set(token, piece);
      this.#place.append(token);
    }
  }

  #step(event) {
    const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!way || !this.#current) return;
    event.preventDefault();
    const next = way > 0 ? this.#current.nextElementSibling : this.#current.previousElementSibling;
    if (this.#pieces.has(next)) next.focus();
  }

  #look(token) {
    const piece = this.#pieces.get(token);
    if (!piece || token === this.#current) return;
    this.#current?.classList.remove("current");
    this.#current?.removeAttribute("aria-describedby");
    this.#stop.tabIndex = -1;
    this.#current = this.#stop = token;
    token.classList.add("current");
    token.tabIndex = 0;
    token.setAttribute("aria-describedby", this.#card.id);
    this.#card.hidden = false;
    this.#card.replaceChildren(...card(piece));
  }
}

/** From 0, certain, to 1, one in a thousand or less: surprise grows with the logarithm. */
function tint(probability) {
  return Math.min(1, -Math.log10(Math.max(probability, 1e-9)) / 3);
}

function card(piece) {
  const best = Math.max(...piece.alternatives.map(([, probability]) => probability));
  const rows = piece.alternatives.map(([token, probability]) => {
    const bar = el("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", (probability / best).toFixed(3));
    const name = el("code", {}, visible(token));
    const row = el("li", {}, name, bar, el("span", { class: "n" }, percent(probability)));
    row.classList.toggle("chosen", token === piece.token);
    return row;
  });
  return [
    el("p", { class: "token-name" }, el("code", {}, visible(piece.token))),
    el(
      "p",
      { class: "token-facts" },
      el("strong", {}, percent(piece.probability)),
      ` likely, after ${duration(piece.ms)}`,
    ),
    el("ol", { class: "alternatives", "aria-label": "What it could have been" }, ...rows),
  ];
}
