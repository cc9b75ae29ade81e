// The rollouts of a run: filtered, sorted and searched by the server, a page at a time.

import { ofRun, onChange } from "./api.js";
import { debounce, duration, h, number, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

const COLUMNS = [
  ["step", "Step"],
  ["", "Environment"],
  ["", "Task"],
  ["", "Reply"],
  ["", "Group"],
  ["reward", "Reward"],
  ["advantage", "Advantage"],
  ["lag", "Lag"],
  ["tokens", "Tokens"],
  ["seconds", "Took"],
  ["", "Error"],
];
const WIDE = new Set(["Group", "Lag", "Took", "Environment"]);
const PAGE = 100;
const FIELDS = ["step", "env", "error", "group", "min_reward", "max_reward", "sort", "order", "q"];

export const rolloutsView = (box, run, query) => new Rollouts(box, run, query).start();

class Rollouts {
  constructor(box, run, query) {
    Object.assign(this, { box, run, at: 0, answer: null, asked: null, offset: Number(query.get("offset") ?? 0) });
    this.wanted = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) ?? ""]));
    this.head = h("tr");
    this.body = h("tbody");
    this.status = h("span", { class: "soft", role: "status" });
    this.loadSoon = debounce(() => this.load().catch(() => {}), 150);
    this.env = this.choice("env", "any environment");
    this.error = this.choice("error", "with or without errors");
    this.previous = h("button", { title: "[", onclick: () => this.page(-1) }, "‹ previous");
    this.next = h("button", { title: "]", onclick: () => this.page(1) }, "next ›");
  }

  async start() {
    replace(
      this.box,
      this.bar(),
      h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, this.head), this.body)),
      h("div", { class: "bar pad" }, this.previous, this.next, this.status),
    );
    await this.load();
    const off = onChange((names) => {
      if (names.has(this.run) && this.offset === 0) this.loadSoon();
    });
    return {
      close: () => {
        off();
        clearTimeout(this.timer);
        this.closed = true;
        this.asked?.abort();
      },
      keys: (key) => this.key(key),
      back: runLink(this.run),
    };
  }

  bar() {
    const field = (name, title, extra = {}) =>
      h("input", {
        placeholder: title,
        "aria-label": title,
        value: this.wanted[name],
        "data-field": name,
        class: "short",
        oninput: (event) => this.set(name, event.target.value),
        ...extra,
      });
    return h(
      "div",
      { class: "bar" },
      field("q", "search in texts", { class: "", type: "search", "data-search": true }),
      field("step", "step", { inputmode: "numeric" }),
      this.env,
      this.error,
      field("min_reward", "reward from", { inputmode: "decimal" }),
      field("max_reward", "reward to", { inputmode: "decimal" }),
      field("group", "group"),
      h(
        "button",
        {
          onclick: () => {
            location.hash = runLink(this.run, "rollouts");
            this.wanted = Object.fromEntries(FIELDS.map((name) => [name, ""]));
            this.box.querySelectorAll("input, select").forEach((one) => {
              one.value = "";
            });
            this.set("q", "");
          },
        },
        "Clear",
      ),
    );
  }

  choice(name, title) {
    return h(
      "select",
      {
        "aria-label": title,
        "data-field": name,
        "data-title": title,
        onchange: (event) => this.set(name, event.target.value),
      },
      h("option", { value: "" }, title),
    );
  }

  options(select, values) {
    const name = select.dataset.field;
    const wanted = ["", ...values];
    if ([...select.options].map((one) => one.value).join("\n") === wanted.join("\n")) return;
    replace(
      select,
      wanted.map((value) =>
        h(
          "option",
          { value, selected: value === this.wanted[name] },
          value === "" ? select.dataset.title : value === "any" ? "any error" : value,
        ),
      ),
    );
  }

  set(name, value) {
    this.wanted[name] = value;
    this.offset = 0;
    this.at = 0;
    const query = new URLSearchParams(Object.entries(this.wanted).filter(([, one]) => one !== ""));
    history.replaceState(null, "", `${runLink(this.run, "rollouts")}?${query}`);
    this.loadSoon();
  }

  async load() {
    this.asked?.abort();
    this.asked = new AbortController();
    clearTimeout(this.timer);
    this.answer = await ofRun(
      this.run,
      "/rollouts",
      { ...this.wanted, offset: this.offset, limit: PAGE },
      this.asked.signal,
    );
    if (this.closed) return;
    this.draw();
    const { indexed, steps } = this.answer.progress;
    const unread = this.answer.rows.some((row) => row.text === null);
    if (indexed < steps || unread) this.timer = setTimeout(() => this.loadSoon(), 1500);
  }

  draw() {
    const { answer, wanted } = this;
    const sort = wanted.sort || "step";
    this.options(this.env, answer.progress.envs);
    this.options(this.error, answer.progress.errors.length ? ["any", ...answer.progress.errors] : []);
    replace(
      this.head,
      COLUMNS.map(([key, title]) =>
        h(
          "th",
          { class: `${key ? "num" : ""} ${WIDE.has(title) ? "wide" : ""}` },
          key
            ? h(
                "button",
                {
                  "aria-label": `sort by ${title}`,
                  onclick: () => {
                    this.wanted.order = sort === key && wanted.order !== "asc" ? "asc" : "";
                    this.set("sort", key);
                  },
                },
                title,
                sort === key ? (wanted.order === "asc" ? " ↑" : " ↓") : "",
              )
            : title,
        ),
      ),
    );
    this.at = Math.min(this.at, Math.max(0, answer.rows.length - 1));
    replace(
      this.body,
      answer.rows.map((row, place) => this.line(row, place)),
    );
    if (!answer.rows.length)
      this.body.append(
        h(
          "tr",
          {},
          h(
            "td",
            { colspan: COLUMNS.length, class: "empty" },
            answer.progress.steps
              ? "No rollout matches."
              : "No rollouts recorded (orchestrator.record_rollouts writes them).",
          ),
        ),
      );
    const { indexed, steps, rollouts } = answer.progress;
    const from = answer.rows.length ? this.offset + 1 : 0;
    const total = answer.total.toLocaleString("en");
    const found = wanted.q
      ? `${answer.rows.length} found, looked into ${(answer.next ?? answer.total).toLocaleString("en")} of ${total}`
      : `${from.toLocaleString("en")} – ${(this.offset + answer.rows.length).toLocaleString("en")} of ${total}`;
    this.status.textContent =
      found +
      (indexed < steps
        ? `; read ${indexed.toLocaleString("en")} of ${steps.toLocaleString("en")} steps`
        : ` (${rollouts.toLocaleString("en")} recorded)`);
    this.previous.disabled = this.offset === 0;
    this.next.disabled = wanted.q ? answer.next === null : this.offset + answer.rows.length >= answer.total;
    this.next.textContent = wanted.q ? "search on ›" : "next ›";
  }

  line(row, place) {
    return h(
      "tr",
      { class: place === this.at ? "at" : "" },
      h("td", { class: "num" }, h("a", { href: this.link(row) }, row.step)),
      h("td", { class: "wide" }, row.env),
      h("td", { class: "mono" }, row.task),
      h("td", { class: "preview", title: row.text ?? "" }, row.text === null ? "…" : visible(row.text)),
      h(
        "td",
        { class: "mono wide" },
        h(
          "button",
          {
            class: "link mono",
            title: "only this group",
            onclick: () => {
              this.box.querySelector("[data-field=group]").value = row.group;
              this.set("group", row.group);
            },
          },
          row.group,
        ),
      ),
      h("td", { class: "num" }, number(row.reward)),
      h("td", { class: `num ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : ""}` }, number(row.advantage)),
      h("td", { class: "num wide" }, row.lag),
      h("td", { class: "num" }, row.tokens),
      h("td", { class: "num wide" }, duration(row.seconds)),
      h("td", { class: "bad" }, row.error),
    );
  }

  link(row) {
    return runLink(this.run, "rollout", row.step, row.line);
  }

  page(direction) {
    if (direction > 0 && this.next.disabled) return;
    if (direction < 0) this.offset = this.wanted.q ? 0 : Math.max(0, this.offset - PAGE);
    else this.offset = this.wanted.q ? this.answer.next : this.offset + PAGE;
    this.at = 0;
    this.load().catch(() => {});
  }

  key(key) {
    const rows = this.answer?.rows ?? [];
    if (key === "j" || key === "ArrowDown") this.at = Math.min(this.at + 1, rows.length - 1);
    else if (key === "k" || key === "ArrowUp") this.at = Math.max(this.at - 1, 0);
    else if (key === "[") this.page(-1);
    else if (key === "]") this.page(1);
    else if (key === "Enter" && rows[this.at] && !["A", "BUTTON"].includes(document.activeElement.tagName))
      location.hash = this.link(rows[this.at]);
    else return false;
    this.body.querySelectorAll("tr").forEach((tr, place) => tr.classList.toggle("at", place === this.at));
    this.body.querySelector("tr.at")?.scrollIntoView({ block: "nearest" });
    return true;
  }
}
