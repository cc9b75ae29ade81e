// The evaluations of a run: a round at a time, its tasks with their scores, and what was said.

import { ofRun, onChange } from "./api.js";
import { h, longText, number, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

const PAGE = 50;

export async function evaluationsView(box, run, query, [wanted]) {
  const rounds = await ofRun(run, "/evaluations");
  const off = onChange(async (names) => {
    if (!names.has(run)) return;
    const now = await ofRun(run, "/evaluations").catch(() => rounds);
    if (now.length !== rounds.length) dispatchEvent(new HashChangeEvent("hashchange")); // a round was added
  });
  const view = { close: off, back: runLink(run) };
  if (!rounds.length) {
    replace(box, h("p", { class: "empty" }, "No evaluations yet (orchestrator.eval says when and on what)."));
    return view;
  }
  const name = rounds.find((one) => one.name === wanted)?.name ?? rounds[0].name;
  const body = h("tbody");
  const more = h("button", { onclick: () => load(body.querySelectorAll("tr.task").length) }, "more tasks");
  const load = async (offset) => {
    const page = await ofRun(run, `/evaluations/${encodeURIComponent(name)}`, { offset, limit: PAGE });
    body.append(...page.tasks.flatMap(lines));
    more.hidden = !page.more;
  };
  replace(
    box,
    h(
      "div",
      { class: "bar" },
      h(
        "select",
        {
          "aria-label": "evaluation",
          onchange: (event) => {
            location.hash = runLink(run, "evaluations", event.target.value);
          },
        },
        rounds.map((one) =>
          h("option", { value: one.name, selected: one.name === name }, `step ${one.step}, ${one.env}`),
        ),
      ),
      h("span", { class: "soft" }, "a click on a task shows what was said"),
    ),
    h(
      "div",
      { class: "card scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Task", "Reward", "Solved", "First reply", "Errors"].map((title) =>
              h("th", { class: title === "Reward" || title === "Solved" ? "num" : null }, title),
            ),
          ),
        ),
        body,
      ),
    ),
    h("div", { class: "bar pad" }, more),
  );
  await load(0);
  return view;
}

// A line of the table, and the line below it that a click opens.
function lines(task) {
  const said = h("tr", { hidden: true }, h("td", { colspan: 5 }));
  const open = () => {
    said.hidden = !said.hidden;
    if (!said.hidden) replace(said.firstElementChild, conversation(task));
  };
  const mean = task.rewards.reduce((sum, one) => sum + one, 0) / task.rewards.length;
  return [
    h(
      "tr",
      { class: "task" },
      h("td", { class: "mono" }, h("button", { class: "link mono", onclick: open }, visible(task.task))),
      h("td", { class: "num" }, number(mean)),
      h("td", { class: "num" }, `${task.passed.filter(Boolean).length} of ${task.passed.length}`),
      h("td", { class: "preview" }, visible((task.replies[0] ?? "").slice(0, 200))),
      h("td", { class: "bad" }, task.errors.length || ""),
    ),
    said,
  ];
}

function conversation(task) {
  const part = (who, text, sampled) =>
    h(
      "div",
      { class: sampled ? "turn sampled" : "turn" },
      h("div", { class: "who" }, h("b", {}, visible(who))),
      longText(text),
    );
  return [
    task.messages.map((message) =>
      part(String(message.role ?? ""), String(message.content ?? ""), message.role === "assistant"),
    ),
    task.replies
      .slice(task.messages.length ? 1 : 0)
      .map((reply, place) => part(`reply ${place + (task.messages.length ? 2 : 1)}`, reply, true)),
    task.errors.map((error) => h("div", { class: "bad" }, longText(error))),
  ];
}
