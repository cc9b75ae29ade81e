// The table of runs: filter, group, sort, and mark several to see them on the same charts.

import { get, onChange } from "./api.js";
import { runLink } from "./route.js";
import { debounce, duration, h, meter, number, replace, visible } from "./dom.js";

const COLUMNS = [
  ["name", "Run"],
  ["status", "Status"],
  ["step", "Step"],
  ["reward", "Reward"],
  ["evaluation", "Evaluation"],
  ["lag", "Lag"],
  ["tokens_per_second", "Training tok/s"],
  ["step_seconds", "A step takes"],
  ["restarts", "Restarts"],
  ["updated_at", "Age"],
];
const GROUPS = [
  ["", "no grouping"],
  ["status", "status"],
  ["envs", "environment"],
  ["model", "model"],
  ["algorithm", "algorithm"],
  ["command", "command"],
];
const WIDE = new Set(["evaluation", "lag", "restarts", "step_seconds"]);

export const runsView = (box) => new Runs(box).start();

class Runs {
  constructor(box) {
    Object.assign(this, {
      box,
      runs: [],
      marked: new Set(),
      at: 0,
      sort: "updated_at",
      down: true,
      filter: "",
      status: "",
    });
    this.group = localStorage.getItem("group") ?? "";
    this.head = h("tr");
    this.body = h("tbody");
    this.compare = h("button", { disabled: true, title: "c", onclick: () => this.open() }, "Compare");
  }

  async start() {
    await this.load();
    replace(
      this.box,
      this.bar(),
      h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, this.head), this.body)),
    );
    const off = onChange(debounce(() => this.load().catch(() => {}), 300));
    const timer = setInterval(() => this.draw(), 30_000);
    return {
      close: () => {
        off();
        clearInterval(timer);
      },
      keys: (key) => this.key(key),
    };
  }

  async load() {
    this.runs = (await get("/api/runs")).runs;
    this.draw();
  }

  bar() {
    const set = (name, value) => {
      this[name] = value;
      this.draw();
    };
    const statuses = ["", "running", "finished", "failed", "stopped"].map((value) =>
      h("option", { value }, value || "any status"),
    );
    const groups = GROUPS.map(([value, title]) =>
      h("option", { value, selected: value === this.group }, value ? `group by ${title}` : title),
    );
    return h(
      "div",
      { class: "bar" },
      h("h1", {}, "Runs"),
      h("input", {
        type: "search",
        "data-search": true,
        placeholder: "filter by name, environment, model",
        "aria-label": "filter runs",
        oninput: (event) => set("filter", event.target.value.toLowerCase()),
      }),
      h("select", { "aria-label": "status", onchange: (event) => set("status", event.target.value) }, statuses),
      h(
        "select",
        {
          "aria-label": "group by",
          onchange: (event) => {
            localStorage.setItem("group", event.target.value);
            set("group", event.target.value);
          },
        },
        groups,
      ),
      this.compare,
    );
  }

  draw() {
    replace(
      this.head,
      h("th"),
      COLUMNS.map(([key, title]) =>
        h(
          "th",
          { class: cell(key) },
          h(
            "button",
            { "aria-label": `sort by ${title}`, onclick: () => this.sortBy(key) },
            title,
            this.sort === key ? (this.down ? " ↓" : " ↑") : "",
          ),
        ),
      ),
    );
    const list = visibleRuns(this);
    this.at = Math.min(this.at, Math.max(0, list.length - 1));
    const label = (run) => [run[this.group]].flat().join(", ") || "–";
    replace(
      this.body,
      list.map((run, place) => [
        this.group && (place === 0 || label(run) !== label(list[place - 1]))
          ? h("tr", { class: "group" }, h("td", { colspan: COLUMNS.length + 1 }, label(run)))
          : null,
        this.line(run, place),
      ]),
    );
    if (!list.length)
      this.body.append(
        h(
          "tr",
          {},
          h(
            "td",
            { class: "empty", colspan: COLUMNS.length + 1 },
            this.runs.length
              ? "No run matches."
              : "No runs here yet. Start one: headway rl @ examples/reverse_text/rl.toml",
          ),
        ),
      );
    this.compare.disabled = this.marked.size < 2;
    this.compare.textContent = this.marked.size ? `Compare ${this.marked.size}` : "Compare";
  }

  line(run, place) {
    return h(
      "tr",
      { class: place === this.at ? "at" : "", "data-run": run.name },
      h(
        "td",
        {},
        h("input", {
          type: "checkbox",
          checked: this.marked.has(run.name),
          "aria-label": `mark ${run.name}`,
          onchange: () => this.mark(run),
        }),
      ),
      h(
        "td",
        {},
        h("a", { href: runLink(run.name) }, run.name),
        h("div", { class: "soft" }, run.envs.join(", ") || run.command),
        run.status === "failed" ? h("div", { class: "bad reason" }, visible(run.reason.split("\n")[0])) : null,
      ),
      h("td", {}, h("span", { class: `tag ${run.status}` }, run.status)),
      h(
        "td",
        { class: "num" },
        run.max_steps ? `${run.step} / ${run.max_steps}` : run.step,
        run.max_steps ? meter(run.step / run.max_steps) : null,
      ),
      h("td", { class: "num" }, number(run.reward)),
      h("td", { class: "num wide" }, number(run.evaluation)),
      h("td", { class: "num wide" }, number(run.lag)),
      h("td", { class: "num" }, number(run.tokens_per_second)),
      h("td", { class: "num wide" }, duration(run.step_seconds)),
      h("td", { class: "num wide" }, run.restarts || "–"),
      h("td", { class: "num" }, duration(Date.now() / 1000 - run.updated_at)),
    );
  }

  sortBy(key) {
    this.down = this.sort === key ? !this.down : true;
    this.sort = key;
    this.draw();
  }

  mark(run) {
    if (!this.marked.delete(run.name)) this.marked.add(run.name);
    this.draw();
  }

  open() {
    location.hash = `#/compare/${encodeURIComponent([...this.marked].map(encodeURIComponent).join(","))}`;
  }

  key(key) {
    const list = visibleRuns(this);
    const run = list[this.at];
    if (key === "j" || key === "ArrowDown") this.at = Math.min(this.at + 1, list.length - 1);
    else if (key === "k" || key === "ArrowUp") this.at = Math.max(this.at - 1, 0);
    else if (key === "x" && run) this.mark(run);
    else if (key === "c" && this.marked.size > 1) this.open();
    else if (key === "Enter" && run && !["A", "BUTTON"].includes(document.activeElement.tagName))
      location.hash = runLink(run.name);
    else return false;
    this.draw();
    this.body.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
    return true;
  }
}

const cell = (key) => `${key === "name" || key === "status" ? "" : "num"} ${WIDE.has(key) ? "wide" : ""}`;

function visibleRuns({ runs, filter, status, sort, down, group }) {
  const words = filter.split(/\s+/).filter(Boolean);
  const text = (run) =>
    [run.name, run.model, run.command, run.algorithm, run.host, ...run.envs].join(" ").toLowerCase();
  const kept = runs.filter(
    (run) => (!status || run.status === status) && words.every((word) => text(run).includes(word)),
  );
  const order = (a, b) => {
    const [left, right] = [a[sort] ?? -Infinity, b[sort] ?? -Infinity];
    return (left < right ? -1 : left > right ? 1 : a.name < b.name ? -1 : 1) * (down ? -1 : 1);
  };
  kept.sort(order);
  if (group) kept.sort((a, b) => [a[group]].flat().join().localeCompare([b[group]].flat().join()));
  return kept;
}
