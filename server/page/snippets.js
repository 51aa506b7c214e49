/** The same call for a terminal, and for OpenAI's Python client. */

const OURS = ["top_k", "session_id", "use_cache"]; // not in OpenAI's client

export function curl(origin, body, key) {
  const lines = [`curl -N ${origin}/v1/completions`, "-H 'Content-Type: application/json'"];
  if (key) lines.push('-H "Authorization: Bearer $ONEROW_API_KEY"');
  // A quote inside of quotes, as the shell wants it.
  const json = JSON.stringify({ ...body, stream: true }).replaceAll("'", "'\\''");
  return `${[...lines, `-d '${json}'`].join(" \\\n  ")}\n`;
}

export function python(origin, model, body, key) {
  const own = Object.entries(body).filter(([name]) => !OURS.includes(name));
  const extra = Object.entries(body).filter(([name]) => OURS.includes(name));
  const fields = [["model", model], ...own].map(
    ([name, value]) => `    ${name}=${literal(value)},`,
  );
  if (extra.length) {
    const pairs = extra.map(([name, value]) => `${literal(name)}: ${literal(value)}`);
    fields.push(`    extra_body={${pairs.join(", ")}},`);
  }
  return [
    ...(key ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=${key ? 'os.environ["ONEROW_API_KEY"]' : '"none"'})`,
    "stream = client.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    '    print(chunk.choices[0].text, end="", flush=True)',
    "",
  ].join("\n");
}

/** Strings and numbers of JSON are literals of Python, too. */
function literal(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}
