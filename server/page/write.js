import { $, show } from "/page/dom.js";
import { counted, duration } from "/page/format.js";
import { curl, python } from "/page/snippets.js";
import { Story } from "/page/story.js";
import { complete } from "/page/stream.js";

const ALTERNATIVES = 5;
const COPIED = 1500; // milliseconds for which a button says so

/** One text, written by the model. */
export class WriteView {
  model = null;
  #api;
  #story = new Story($("write-text"), $("write-token"));
  #running = null; // an AbortController
  #ids = []; // of the whole text, prompt included, or the text itself: what Continue goes on from
  #last = null; // the body of the last call that began a text

  constructor(api) {
    this.#api = api;
    $("write-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#begin(this.#body());
    });
    $("write-stop").addEventListener("click", () => this.#running?.abort());
    $("write-again").addEventListener("click", () => this.#begin(this.#last));
    $("write-continue").addEventListener("click", () => {
      if ($("write-form").reportValidity()) this.#write({ ...this.#body(), prompt: this.#ids });
    });
    this.#copies($("write-curl"), (origin) => curl(origin, this.#body(), api.keyed));
    this.#copies($("write-python"), (origin) =>
      python(origin, this.model?.id ?? "stories", this.#body(), api.keyed),
    );
  }

  /** Offer the sessions that there are. */
  async enter() {
    const { data } = await this.#api.get("/v1/sessions").catch(() => ({ data: [] }));
    const options = data.map(({ id }) => new Option(id, id));
    $("write-sessions").replaceChildren(...options);
  }

  leave() {} // what is being written goes on

  #body() {
    const optional = {};
    if ($("write-seed").value) optional.seed = Number($("write-seed").value);
    if ($("write-session").value) optional.session_id = $("write-session").value;
    return {
      prompt: $("write-prompt").value,
      max_tokens: Number($("write-max").value),
      temperature: Number($("write-temperature").value),
      top_p: Number($("write-top-p").value),
      top_k: Number($("write-top-k").value),
      ...optional,
    };
  }

  #begin(body) {
    this.#last = body;
    this.#ids = [];
    this.#story.clear(body.prompt);
    return this.#write(body);
  }

  async #write(body) {
    this.#running?.abort();
    const running = new AbortController();
    this.#running = running;
    this.#enable(true);
    show($("write-error"), null);
    $("write-status").textContent = "Writing…";
    $("write-legend").hidden = false;
    const made = [];
    const pieces = (new_) => {
      if (this.#running !== running) return;
      this.#story.add(new_);
      made.push(...new_.map((piece) => piece.id));
    };
    const call = { ...body, logprobs: ALTERNATIVES };
    try {
      const result = await complete(this.#api, call, running.signal, { pieces });
      this.#ids = [
        ...result.promptIds,
        ...made.slice(0, result.reason === "stop" ? -1 : undefined),
      ];
      $("write-status").textContent = summary(result);
    } catch (error) {
      if (this.#running !== running) return; // another text has begun
      show($("write-error"), error);
      $("write-status").textContent =
        error.name === "AbortError" ? `Stopped after ${counted(made.length, "token")}.` : "";
      // From the text as it stands: the ids of the prompt may not have come.
      if (made.length) this.#ids = this.#story.text;
    } finally {
      if (this.#running === running) {
        this.#running = null;
        this.#enable(false);
      }
    }
  }

  #enable(running) {
    $("write-stop").disabled = !running;
    $("write-again").disabled = running || !this.#last;
    $("write-continue").disabled = running || !this.#ids.length;
  }

  #copies(button, text) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text(location.origin));
        button.textContent = "Copied";
      } catch {
        button.textContent = "The browser forbids it";
      }
      setTimeout(() => (button.textContent = label), COPIED);
    });
  }
}

function summary({ usage, timings, reason, first, total }) {
  const made = usage.completion_tokens;
  const ending = reason === "stop" ? "the text ended by itself" : "as many as asked for";
  const pace = made > 1 ? `, then ${duration((total - first) / (made - 1))} each` : "";
  return (
    `${counted(made, "token")}, ${ending}. The first after ${duration(first)}${pace}. ` +
    `${counted(timings.rows_computed, "row")} computed, ` +
    `${counted(timings.rows_reused, "row")} reused.`
  );
}
