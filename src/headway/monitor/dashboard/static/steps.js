// One step of a run: what its batch was made of, what was dropped meanwhile, and who waited for whom.

import { ofRun, onChange } from "./api.js";
import { debounce, h, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

export async function stepsView(box, run, query, [wanted]) {
  let found = {};
  const draw = async () => {
    found = await ofRun(run, "/steps", { step: wanted });
    if (found.problem) replace(box, h("p", { class: "empty" }, visible(found.problem)));
    else replace(box, chooser(run, found), story(found.lines));
  };
  await draw();
  const newest = debounce(() => draw().catch(() => {}), 1000); // a journal is read whole
  const off = onChange((names) => !wanted && names.has(run) && newest());
  const keys = (key) => {
    const step = { "[": found.step - 1, "]": found.step + 1 }[key];
    if (!(step >= found.first && step <= found.last)) return false;
    location.hash = runLink(run, "steps", step);
    return true;
  };
  return { close: off, keys, back: runLink(run) };
}

const chooser = (run, found) =>
  h(
    "div",
    { class: "bar pad" },
    h(
      "label",
      {},
      "Step ",
      h("input", {
        type: "number",
        "data-search": true,
        min: found.first,
        max: found.last,
        value: found.step,
        onchange: (event) => (location.hash = runLink(run, "steps", Number(event.target.value))),
      }),
    ),
    h("span", { class: "soft" }, `of ${found.first} to ${found.last}; [ and ] go to the one before and after`),
  );

const story = (lines) =>
  h(
    "section",
    { class: "card pad" },
    lines.map((line) =>
      line.startsWith("  ") ? h("div", { class: "mono" }, visible(line.trim())) : h("p", {}, visible(line)),
    ),
  );
