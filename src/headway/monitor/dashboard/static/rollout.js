// One rollout: as a conversation, token by token, or beside another one of its group.

import { ofRun } from "./api.js";
import { conversation } from "./conversation.js";
import { diffView } from "./diff.js";
import { duration, h, number, replace, visible } from "./dom.js";
import { runLink } from "./route.js";
import { Tokens } from "./tokens.js";

const MODES = [
  ["", "Conversation"],
  ["tokens", "Tokens"],
  ["raw", "Record"],
];

export async function rolloutView(box, run, step, line, query) {
  const at = `/rollouts/${step}/${line}`;
  const record = await ofRun(run, at);
  const siblings = await ofRun(run, "/rollouts", { step, group: record.group.slice(-8), order: "asc", limit: 500 });
  const group = siblings.rows.sort((a, b) => a.line - b.line);
  const place = group.findIndex((row) => row.line === line);
  const mode = query.get("view") ?? "";
  const other = query.has("diff") ? Number(query.get("diff")) : null;
  const link = (to, view = mode, diff = null) =>
    `${runLink(run, "rollout", step, to)}?${new URLSearchParams({ ...(view ? { view } : {}), ...(diff === null ? {} : { diff }) })}`;

  const body = h("div");
  replace(
    box,
    facts(record, step),
    h(
      "div",
      { class: "bar" },
      h("span", { class: "soft" }, "group"),
      h(
        "div",
        { class: "chips" },
        group.map((row) =>
          h(
            "a",
            {
              href: link(row.line, mode),
              "aria-current": row.line === line ? "true" : null,
              title: `rollout ${row.line}, advantage ${number(row.advantage)}`,
            },
            number(row.reward),
          ),
        ),
      ),
    ),
    h(
      "div",
      { class: "bar" },
      MODES.map(([view, title]) =>
        h(
          "a",
          { href: link(line, view), class: "tag", "aria-current": view === mode && other === null ? "page" : null },
          title,
        ),
      ),
      h(
        "label",
        {},
        "side by side with",
        h(
          "select",
          {
            id: "diff",
            "aria-label": "compare with",
            onchange: (event) => {
              if (event.target.value) location.hash = link(line, "", event.target.value);
            },
          },
          h("option", { value: "" }, "…"),
          group
            .filter((row) => row.line !== line)
            .map((row) =>
              h(
                "option",
                { value: row.line, selected: row.line === other },
                `rollout ${row.line}, reward ${number(row.reward)}`,
              ),
            ),
        ),
      ),
    ),
    body,
  );
  if (other !== null) diffView(body, run, [line, record], [other, await ofRun(run, `/rollouts/${step}/${other}`)]);
  else if (mode === "tokens") await new Tokens(body, run, at, record).start();
  else if (mode === "raw")
    replace(body, h("div", { class: "card pad text" }, visible(JSON.stringify(record, null, 2)).slice(0, 200_000)));
  else replace(body, conversation(record, run));

  const go = (to) => {
    if (group[to]) location.hash = link(group[to].line, mode);
    return true;
  };
  const apart = group.findIndex((row) => row.reward !== group[place]?.reward);
  return {
    back: `${runLink(run, "rollouts")}?step=${step}`,
    keys: (key) => {
      if (key === "[") return go(place - 1);
      if (key === "]") return go(place + 1);
      if (key === "d" && group.length > 1) {
        location.hash = link(line, "", group[apart >= 0 ? apart : place ? 0 : 1].line);
        return true;
      }
      return false;
    },
  };
}

function facts(record, step) {
  const { episode } = record;
  const fact = (title, value, className = "") =>
    h("div", { class: "card tile" }, h("span", { class: "soft" }, title), h("b", { class: className }, value));
  const advantages = record.samples.map((sample) => number(sample.advantage)).join(", ");
  return h(
    "div",
    { class: "tiles" },
    fact("step", step),
    fact("environment", record.env),
    fact("task", visible(String(episode.task.id)).slice(0, 40)),
    fact("reward", number(record.reward)),
    fact("advantage", advantages || "not trained"),
    fact("lag", record.lag),
    fact("took", duration(episode.timings?.total)),
    episode.error ? fact("error", episode.error.kind, "bad") : null,
  );
}
