/**
 * Server-sent events, read from a body: EventSource can neither post nor send a key.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string[]>} the data of the events that came together: a browser that is
 *   busy reads several at once, and the time between them is not to be had any more
 */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      const found = parts.map(data).filter((text) => text !== null);
      if (found.length) yield found;
    }
  } finally {
    // Whoever stops reading hangs up: the server frees the request's rows at once.
    await reader.cancel().catch(() => {});
  }
}

/** The data of one event; null for a comment, which has none. */
function data(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null;
}
