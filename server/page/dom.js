/** @param {string} id @returns {HTMLElement} */
export function $(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`there is no #${id}`);
  return found;
}

/**
 * An element with properties and children. Strings become text nodes, never markup.
 *
 * @param {string} tag
 * @param {Record<string, any>} [properties] `class`, `data-*`, `aria-*`, `colspan` and so on are
 *   attributes; functions are listeners (`onclick`)
 */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** @param {string} tag */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Show a failure in its place; null hides it. Hanging up is no failure. */
export function show(place, error) {
  const said = error && error.name !== "AbortError";
  place.hidden = !said;
  place.textContent = said ? error.message : "";
}

/** A colour of the style sheet, as the canvas needs it: [r, g, b]. */
export function colour(name) {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data.slice(0, 3);
}

/** Call back when the reader changes between light and dark. */
export function onSchemeChange(listener) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
