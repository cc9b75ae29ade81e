// Signs that a run's reward is had without doing the task: findings, the gravest first, with rollouts that show them.

import { ofRun, onChange } from "./api.js";
import { debounce, h, number, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

const COLORS = { problem: "failed", warning: "stopped", notice: "" };

export async function auditView(box, run) {
  const draw = async () => {
    const audit = await ofRun(run, "/audit");
    replace(
      box,
      h(
        "p",
        { class: "soft", role: "status" },
        audit.rollouts
          ? `${audit.rollouts.toLocaleString("en")} rollouts of steps ${audit.first_step} to ${audit.last_step} were looked at.`
          : "No rollouts are recorded yet.",
      ),
      audit.findings.length ? audit.findings.map((found) => finding(run, found)) : empty(audit),
    );
  };
  await draw();
  const later = debounce(() => draw().catch(() => {}), 2000); // an audit takes seconds, and steps come faster
  const off = onChange((names) => names.has(run) && later());
  return { close: off, back: runLink(run) };
}

const empty = (audit) =>
  audit.rollouts ? h("p", { class: "empty" }, "Nothing was found that earns the reward besides the task.") : null;

function finding(run, found) {
  const where = found.env ? ` in ${visible(found.env)}` : "";
  return h(
    "section",
    { class: "card pad finding" },
    h("h3", {}, h("span", { class: `tag ${COLORS[found.level]}` }, found.level), ` ${found.cause}${where}`),
    h("p", {}, visible(found.text)),
    h("p", { class: "soft" }, visible(found.remedy)),
    h(
      "p",
      { class: "mono" },
      Object.entries(found.figures).map(([name, value], place) => [
        place ? " · " : "",
        h("span", { class: "figure" }, `${visible(name)} ${number(value)}`),
      ]),
    ),
    found.examples.map((one) =>
      h(
        "a",
        { class: "row", href: runLink(run, "rollout", one.step, one.line) },
        h("span", { class: "mono" }, `step ${one.step}, reward ${number(one.reward)}`),
        h("span", { class: "text" }, visible(one.text)),
      ),
    ),
  );
}
