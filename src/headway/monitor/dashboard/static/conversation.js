// A rollout as people read it: who said what, tool calls included, and what was sampled by the policy.

import { imageOf } from "./api.js";
import { h, longText, number, visible } from "./dom.js";

export function conversation(record, run) {
  const { episode } = record;
  return [
    episode.error
      ? h(
          "div",
          { class: "card pad bad" },
          h("b", {}, `${episode.error.kind}: `),
          longText(episode.error.message ?? ""),
          episode.error.detail ? longText(episode.error.detail) : null,
        )
      : null,
    episode.traces.map((trace, place) =>
      h(
        "section",
        { class: "card pad" },
        h("h3", {}, trace.agent ?? "policy", " ", h("span", { class: "soft" }, rewards(trace))),
        trace.tools?.length ? offered(trace.tools) : null,
        trace.branches.map((branch, order) => [
          trace.branches.length > 1 ? h("h3", { class: "soft" }, `branch ${order + 1}`) : null,
          branch.map((node) => turn(trace.nodes[node], run)),
        ]),
        Object.entries(trace.notes ?? {}).map(([name, note]) =>
          h("div", { class: "turn" }, h("div", { class: "who" }, h("b", {}, visible(name))), longText(note)),
        ),
        place < episode.traces.length - 1 ? h("hr") : null,
      ),
    ),
  ];
}

function offered(tools) {
  const signature = ({ name, parameters }) => `${name}(${Object.keys(parameters?.properties ?? {}).join(", ")})`;
  return h(
    "div",
    { class: "turn" },
    h("div", { class: "who" }, h("b", {}, "tools")),
    longText(tools.map(signature).join("\n")),
  );
}

export function rewards(trace) {
  const parts = Object.entries({ ...trace.rewards, ...trace.metrics }).map(
    ([name, value]) => `${name} ${number(value)}`,
  );
  return [`reward ${number(trace.reward ?? 0)}`, ...parts, ...(trace.truncated ? ["truncated"] : [])].join("  ");
}

export const versions = (node) => (node.versions ?? []).map(([version, count]) => `v${version} × ${count}`).join(", ");

export function turn(node, run, text = longText) {
  const { message } = node;
  if (!message) return null;
  return h(
    "div",
    { class: node.sampled ? "turn sampled" : "turn" },
    h(
      "div",
      { class: "who" },
      h("b", {}, message.role),
      message.name ? h("span", {}, visible(message.name)) : null,
      h("span", {}, `${node.tokens} tokens`),
      node.sampled ? h("span", {}, versions(node)) : null,
      node.finish_reason ? h("span", {}, node.finish_reason) : null,
    ),
    message.reasoning ? longText(message.reasoning, "text reason") : null,
    (message.images ?? []).map((image) =>
      h("img", { class: "shown", src: imageOf(run, image.digest), alt: `image ${image.digest}`, loading: "lazy" }),
    ),
    message.content ? text(message.content) : null,
    (message.tool_calls ?? []).map((call) =>
      h("div", { class: "call" }, h("b", {}, visible(call.name)), longText(pretty(call.arguments))),
    ),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
