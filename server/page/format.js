const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 });

/** 12,345 */
export const count = (n) => whole.format(n);

/** "1 row", "12,345 rows" */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** 43 %, 4.3 %, 0.04 % */
export function percent(share) {
  const p = 100 * share;
  return `${p >= 9.95 || p === 0 ? p.toFixed(0) : p >= 0.095 ? p.toFixed(1) : p.toFixed(2)} %`;
}

/** 3.2 ms, 1.24 s */
export function duration(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms >= 99.5 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

/** 512 MiB */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${n >= 100 || unit === 0 || n === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[unit]}`;
}

/** A token as a reader can see it: spaces and line ends have a shape. */
export function visible(token) {
  if (token.startsWith("bytes:")) return token.slice(6);
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎");
}

/** The middle of some numbers; NaN of none. */
export function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
