/**
 * What a stream of completions makes, token by token.
 *
 * @typedef {object} Piece
 * @property {string} text its part of the text; empty for the end of the text, and in the middle of
 *   a character
 * @property {string} token its name in the vocabulary
 * @property {number} id
 * @property {number} probability
 * @property {[string, number][]} alternatives tokens and their probabilities, best first
 * @property {number} ms since the token before it; those that come together share their time
 */

/**
 * @param {import("/page/api.js").Api} api
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {{pieces: (pieces: Piece[]) => void}} listener
 * @returns {Promise<{usage: any, timings: any, reason: string, promptIds: number[], first: number,
 *   total: number}>} times in milliseconds
 */
export async function complete(api, body, signal, listener) {
  const start = performance.now();
  const result = {
    usage: null,
    timings: null,
    reason: null,
    promptIds: [],
    first: NaN,
    total: NaN,
  };
  let before = start;
  let shown = 0; // characters, as Python counts them
  const options = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
  const call = { ...body, ...options };
  for await (const batch of api.stream("POST", "/v1/completions", call, signal)) {
    const now = performance.now();
    const pieces = [];
    for (const event of batch) {
      const [choice] = event.choices;
      if (choice) {
        pieces.push(...piecesOf(choice, shown));
        shown += [...choice.text].length;
        result.promptIds = choice.prompt_token_ids ?? result.promptIds;
        result.reason ??= choice.finish_reason;
      }
      result.usage ??= event.usage ?? null;
      result.timings ??= event.timings ?? null;
    }
    if (!pieces.length) continue;
    for (const piece of pieces) piece.ms = (now - before) / pieces.length;
    if (before === start) result.first = now - start;
    before = now;
    listener.pieces(pieces);
  }
  if (!result.usage) throw new Error("The stream broke off.");
  result.total = performance.now() - start;
  return result;
}

/** One piece per token. An event has several when text was held back, or its reader was slow. */
function piecesOf(choice, shown) {
  const { tokens, token_logprobs, top_logprobs, text_offset } = choice.logprobs;
  const characters = [...choice.text];
  return tokens.map((token, i) => {
    const from = i ? text_offset[i] - shown : 0;
    const to = i + 1 < tokens.length ? text_offset[i + 1] - shown : characters.length;
    return {
      text: characters.slice(from, to).join(""),
      token,
      id: choice.token_ids[i],
      probability: Math.exp(token_logprobs[i]),
      alternatives: Object.entries(top_logprobs[i])
        .map(([name, logprob]) => [name, Math.exp(logprob)])
        .sort((a, b) => b[1] - a[1]),
      ms: NaN, // not known yet
    };
  });
}
