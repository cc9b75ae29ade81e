// The table of runs: filter, group, sort, and mark several to see them on the same charts.

import { get, onChange } from "./api.js";
import { runLink } from "./route.js";
import { debounce, duration, h, meter, number, replace } from "./dom.js";

const COLUMNS = [
  ["name", "Run"], ["status", "Status"], ["step", "Step"], ["reward", "Reward"], ["evaluation", "Evaluation"],
  ["lag", "Lag"], ["tokens_per_second", "Training tok/s"], ["step_seconds", "Step"], ["restarts", "Restarts"], ["updated_at", "Age"],
];
const GROUPS = [["", "no grouping"], ["status", "status"], ["envs", "environment"], ["model", "model"], ["algorithm", "algorithm"], ["command", "command"]];
const WIDE = new Set(["evaluation", "lag", "restarts", "step_seconds"]);

export async function runsView(box) {
  const state = { runs: [], marked: new Set(), at: 0, sort: "updated_at", down: true, filter: "", group: localStorage.getItem("group") ?? "", status: "" };
  const body = h("tbody");
  const head = h("tr");
  const compare = h("button", { disabled: true, title: "c", onclick: () => open() }, "Compare");
  const rows = () => visibleRuns(state);

  const draw = () => {
    replace(head, h("th", {}, h("span", { class: "soft" }, "")), COLUMNS.map(([key, title]) => h("th", { class: cell(key) },
      h("button", { "aria-label": `sort by ${title}`, onclick: () => { state.down = state.sort === key ? !state.down : true; state.sort = key; draw(); } },
        title, state.sort === key ? (state.down ? " ↓" : " ↑") : ""))));
    const list = rows();
    state.at = Math.min(state.at, Math.max(0, list.length - 1));
    let group = null;
    replace(body, list.map((run, place) => {
      const label = state.group ? [run[state.group]].flat().join(", ") || "–" : null;
      const title = state.group && label !== group ? h("tr", { class: "group" }, h("td", { colspan: COLUMNS.length + 1 }, label)) : null;
      group = label;
      return [title, line(run, place)];
    }));
    if (!list.length) body.append(h("tr", {}, h("td", { class: "empty", colspan: COLUMNS.length + 1 },
      state.runs.length ? "No run matches." : "No runs here yet. Start one: headway rl @ examples/reverse_text/rl.toml")));
    compare.disabled = state.marked.size < 2;
    compare.textContent = state.marked.size ? `Compare ${state.marked.size}` : "Compare";
  };

  const mark = (run) => { state.marked.has(run.name) ? state.marked.delete(run.name) : state.marked.add(run.name); draw(); };
  const open = () => { location.hash = `#/compare/${encodeURIComponent([...state.marked].map(encodeURIComponent).join(","))}`; };

  const line = (run, place) => h("tr", { class: place === state.at ? "at" : "", "data-run": run.name },
    h("td", {}, h("input", { type: "checkbox", checked: state.marked.has(run.name), "aria-label": `mark ${run.name}`, onchange: () => mark(run) })),
    h("td", {}, h("a", { href: runLink(run.name) }, run.name), h("div", { class: "soft" }, run.envs.join(", ") || run.command)),
    h("td", {}, h("span", { class: `tag ${run.status}` }, run.status)),
    h("td", { class: "num" }, run.max_steps ? `${run.step} / ${run.max_steps}` : run.step, run.max_steps ? meter(run.step / run.max_steps) : null),
    h("td", { class: "num" }, number(run.reward)),
    h("td", { class: "num wide" }, number(run.evaluation)),
    h("td", { class: "num wide" }, number(run.lag)),
    h("td", { class: "num" }, number(run.tokens_per_second)),
    h("td", { class: "num wide" }, duration(run.step_seconds)),
    h("td", { class: "num wide" }, run.restarts || "–"),
    h("td", { class: "num" }, duration(Date.now() / 1000 - run.updated_at)));

  const load = async () => { state.runs = (await get("/api/runs")).runs; draw(); };
  await load();
  replace(box,
    h("div", { class: "bar" }, h("h1", {}, "Runs"),
      h("input", { type: "search", "data-search": true, placeholder: "filter by name, environment, model", "aria-label": "filter runs",
        oninput: (event) => { state.filter = event.target.value.toLowerCase(); draw(); } }),
      h("select", { "aria-label": "status", onchange: (event) => { state.status = event.target.value; draw(); } },
        ["", "running", "finished", "stopped"].map((value) => h("option", { value }, value || "any status"))),
      h("select", { "aria-label": "group by", onchange: (event) => { state.group = event.target.value; localStorage.setItem("group", state.group); draw(); } },
        GROUPS.map(([value, title]) => h("option", { value, selected: value === state.group }, value ? `group by ${title}` : title))),
      compare),
    h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, head), body)));
  const off = onChange(debounce(load, 300));
  const timer = setInterval(draw, 30_000);
  return {
    close: () => { off(); clearInterval(timer); },
    keys: (key) => {
      const list = rows();
      if (key === "j" || key === "ArrowDown") state.at = Math.min(state.at + 1, list.length - 1);
      else if (key === "k" || key === "ArrowUp") state.at = Math.max(state.at - 1, 0);
      else if (key === "x" && list[state.at]) { mark(list[state.at]); return true; }
      else if (key === "c" && state.marked.size > 1) { open(); return true; }
      else if (key === "Enter" && list[state.at] && document.activeElement.tagName !== "A" && document.activeElement.tagName !== "BUTTON") { location.hash = runLink(list[state.at].name); return true; }
      else return false;
      draw();
      body.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
      return true;
    },
  };
}

const cell = (key) => `${key === "name" || key === "status" ? "" : "num"} ${WIDE.has(key) ? "wide" : ""}`;

function visibleRuns({ runs, filter, status, sort, down, group }) {
  const words = filter.split(/\s+/).filter(Boolean);
  const text = (run) => [run.name, run.model, run.command, run.algorithm, run.host, ...run.envs].join(" ").toLowerCase();
  const kept = runs.filter((run) => (!status || run.status === status) && words.every((word) => text(run).includes(word)));
  const order = (a, b) => {
    const [left, right] = [a[sort] ?? -Infinity, b[sort] ?? -Infinity];
    return (left < right ? -1 : left > right ? 1 : a.name < b.name ? -1 : 1) * (down ? -1 : 1);
  };
  kept.sort(order);
  if (group) kept.sort((a, b) => [a[group]].flat().join().localeCompare([b[group]].flat().join()));
  return kept;
}
