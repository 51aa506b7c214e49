import { Api, ApiError } from "/page/api.js";
import { CacheView } from "/page/cache.js";
import { $ } from "/page/dom.js";
import { askForKey } from "/page/key.js";
import { RaceView } from "/page/race.js";
import { RowView } from "/page/row.js";
import { WriteView } from "/page/write.js";

const RETRY = 700; // milliseconds between two looks at a server that is loading

const api = new Api(askForKey);
const views = {
  write: new WriteView(api),
  race: new RaceView(api),
  cache: new CacheView(api),
  row: new RowView(api),
};

let greeted = false;

/** Show the view that the address names; each one is told when it comes and goes. */
function route() {
  const asked = location.hash.slice(1);
  if (asked === "main") return; // the skip link
  const name = asked in views ? asked : "write";
  for (const [other, view] of Object.entries(views)) {
    const section = $(`view-${other}`);
    if (greeted && other !== name && !section.hidden) view.leave();
    section.hidden = other !== name;
    const link = document.querySelector(`nav a[href="#${other}"]`);
    if (other === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${document.querySelector('nav [aria-current="page"]').textContent} · onerow`;
  if (greeted) views[name].enter();
}

/** Say what is served, once it is: a server that has just been started is still loading. */
async function greet() {
  for (;;) {
    try {
      const [models, { version }] = await Promise.all([api.get("/v1/models"), api.get("/version")]);
      const [model] = models.data;
      $("server").textContent = `${model.id}, window of ${model.max_model_len} tokens`;
      $("version").textContent = `onerow ${version}`;
      return model;
    } catch (error) {
      $("server").textContent = error.message;
      if (!(error instanceof ApiError && error.code === "loading")) return null;
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }
}

addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form?.requestSubmit();
});
route();
const model = await greet();
for (const view of Object.values(views)) view.model = model;
greeted = true;
route();
