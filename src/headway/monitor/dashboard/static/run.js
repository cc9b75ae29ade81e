// The charts of one run, or of several on top of each other.

import { get, ofRun, onChange } from "./api.js";
import { Chart, PALETTE, saveCsv } from "./chart.js";
import { debounce, duration, h, longText, number, replace, visible } from "./dom.js";
import { Heat } from "./heat.js";
import { Painter } from "./painter.js";
import { keysOf, panelsFor } from "./panels.js";
import { runLink } from "./route.js";

const POINTS = 600;
const split = (key) => [key.slice(0, key.indexOf(":")), key.slice(key.indexOf(":") + 1)];

export const runView = (box, run) => new Board(box, [run]).start();
export const compareView = (box, runs) => new Board(box, runs).start();

// All charts of a page: what they share is the x axis, the zoom, the smoothing and the runs they show.
class Board {
  constructor(box, runs) {
    Object.assign(this, {
      box,
      runs,
      charts: new Map(),
      heats: [],
      range: null,
      detail: {},
      series: {},
      sync: `board-${Math.random()}`,
      painter: new Painter(),
      size: { width: 360, height: 210 },
    });
    this.options = {
      smoothing: Number(localStorage.getItem("smoothing") ?? 0),
      x: localStorage.getItem("x") === "time" ? "time" : "step",
      filter: "",
    };
    this.failure = h("div", { role: "status" });
    this.tiles = h("div", { class: "tiles" });
    this.grid = h("div", { class: "charts" });
    this.watch = new ResizeObserver(() => this.measure());
    this.watch.observe(this.grid);
    this.loadSoon = debounce(() => this.load().catch(() => {}), 250);
  }

  async start() {
    await Promise.all([this.load(), this.summaries()]);
    replace(this.box, this.failure, this.tiles, this.bar(), this.grid);
    if (this.runs.length > 1) this.box.append(await settingsDifference(this.runs));
    this.draw();
    this.painter.rested().then(() => this.loadHeats()); // reading rollouts is work for the server; charts come first
    const off = onChange(async (names) => {
      if (!this.runs.some((run) => names.has(run))) return;
      await Promise.all([this.load(), this.summaries()]).catch(() => {});
      this.painter.rested().then(() => this.loadHeats());
    });
    return {
      close: () => {
        off();
        this.closed = true;
        this.watch.disconnect();
        this.clear();
        this.painter.close();
      },
      back: "#/",
    };
  }

  bar() {
    const smoothing = h("input", {
      type: "range",
      min: 0,
      max: 0.99,
      step: 0.01,
      value: this.options.smoothing,
      "aria-label": "smoothing",
      oninput: (event) => {
        this.options.smoothing = Number(event.target.value);
        localStorage.setItem("smoothing", event.target.value);
        this.draw();
      },
    });
    const axis = h(
      "select",
      {
        "aria-label": "x axis",
        onchange: (event) => {
          this.options.x = event.target.value;
          localStorage.setItem("x", event.target.value);
          this.range = null;
          this.load();
        },
      },
      [
        ["step", "by step"],
        ["time", "by time"],
      ].map(([value, title]) => h("option", { value, selected: value === this.options.x }, title)),
    );
    this.unzoom = h("button", { disabled: true, onclick: () => this.reset() }, "Reset zoom");
    return h(
      "div",
      { class: "bar" },
      h("input", {
        type: "search",
        "data-search": true,
        placeholder: "filter charts",
        "aria-label": "filter charts",
        oninput: (event) => {
          this.options.filter = event.target.value.toLowerCase();
          this.filter();
        },
      }),
      h("label", {}, "smoothing", smoothing),
      axis,
      this.unzoom,
      h("span", { class: "soft wide" }, "drag to zoom, double-click to see all"),
    );
  }

  async summaries() {
    const known = new Map((await get("/api/runs")).runs.map((run) => [run.name, run]));
    const tile = (title, value, extra = "") =>
      h("div", { class: "card tile" }, h("span", { class: "soft" }, title), h("b", { class: extra }, value));
    if (this.runs.length > 1) {
      replace(
        this.tiles,
        this.runs.map((name, place) => {
          const run = known.get(name);
          return h(
            "div",
            { class: "card tile" },
            h("span", { class: "soft" }, run ? `${run.status}, step ${run.step}` : "gone"),
            h("b", { class: `run-${place}` }, name),
          );
        }),
      );
      return;
    }
    const run = known.get(this.runs[0]);
    if (!run) return;
    replace(this.failure, failure(run));
    replace(
      this.tiles,
      tile("status", run.status, { running: "good", failed: "bad" }[run.status] ?? ""),
      tile("step", run.max_steps ? `${run.step} / ${run.max_steps}` : run.step),
      run.reward === null ? tile("loss", number(run.loss)) : tile("reward", number(run.reward)),
      run.evaluation === null ? null : tile("evaluation", number(run.evaluation)),
      run.lag === null ? null : tile("lag", number(run.lag)),
      tile("training tok/s", number(run.tokens_per_second)),
      tile("a step takes", duration(run.step_seconds)),
      run.max_steps && run.status === "running"
        ? tile("left", duration((run.max_steps - run.step) * run.step_seconds))
        : tile("took", duration(run.updated_at - run.started_at)),
      run.restarts ? tile("restarts", run.restarts, "warn") : null,
    );
  }

  async load() {
    await Promise.all(
      this.runs.map(async (run) => {
        this.detail[run] = await ofRun(run);
      }),
    );
    const processes = {};
    for (const detail of Object.values(this.detail)) {
      for (const [process, { names }] of Object.entries(detail.processes)) {
        processes[process] = { names: [...new Set([...(processes[process]?.names ?? []), ...names])] };
      }
    }
    this.panels = panelsFor(processes, this.runs.length > 1);
    await Promise.all(
      this.runs.map(async (run) => {
        const whole = Object.keys(this.detail[run].processes).map((process) => `${process}:*`);
        this.series[run] = await this.fetch(run, whole, POINTS, this.range);
      }),
    );
    if (!this.closed) this.draw();
  }

  fetch(run, keys, points, range) {
    const zoom = range && this.options.x === "step" ? { from: Math.floor(range[0]), to: Math.ceil(range[1]) } : {};
    return ofRun(run, "/series", { name: keys, points, ...zoom });
  }

  draw() {
    if (!this.grid.isConnected) return;
    const wanted = this.panels
      .map((panel) => panel.section ?? `${panel.title}:${panel.heat ?? this.lines(panel).map((line) => line.label)}`)
      .join("|");
    if (wanted !== this.built) this.build(wanted);
    for (const { chart, panel } of this.charts.values())
      chart.setData(() => this.table(panel, this.series), this.range);
    if (this.unzoom) this.unzoom.disabled = this.range === null;
    this.filter();
  }

  build(wanted) {
    this.clear();
    this.built = wanted;
    for (const panel of this.panels) {
      if (panel.section) this.grid.append(h("h2", { class: "section" }, panel.section));
      else if (panel.heat) {
        if (this.runs.length > 1) continue;
        const heat = new Heat(panel.title, this.runs[0], panel.heat, this);
        this.heats.push(heat);
        this.grid.append(heat.node);
      } else {
        const chart = new Chart(panel.title, this.lines(panel), this, {
          log: panel.log,
          raw: panel.raw,
          band: this.runs.length > 1 ? null : panel.band,
          csv: () => this.csv(panel),
        });
        this.charts.set(panel.title, { chart, panel });
        this.grid.append(chart.node);
      }
    }
    this.measure();
  }

  // Charts are of one size, looked up once for all of them when the page has been laid out.
  measure() {
    const plot = this.grid.querySelector(".chart:not([hidden]) .plot");
    if (!plot?.clientWidth) return;
    const size = { width: Math.max(160, plot.clientWidth), height: plot.clientHeight };
    if (size.width === this.size.width && size.height === this.size.height) return;
    this.size = size;
    for (const item of this.painter.items.values()) this.painter.want(item);
  }

  // One line per metric; with several runs one per run, of the panel's main metric.
  lines(panel) {
    if (this.runs.length === 1)
      return panel.lines.map((line, place) => ({
        ...line,
        run: this.runs[0],
        color: PALETTE[place % PALETTE.length],
        dashed: place >= PALETTE.length,
      }));
    const line = panel.lines.find((one) => one.main) ?? panel.lines[0];
    return this.runs.map((run, place) => ({
      ...line,
      run,
      label: run,
      off: false,
      color: PALETTE[place % PALETTE.length],
      dashed: place >= PALETTE.length,
    }));
  }

  // Columns of different processes and runs over one x axis.
  table(panel, series) {
    const lines = [
      ...this.lines(panel),
      ...(panel.band && this.runs.length === 1 ? panel.band.map((line) => ({ ...line, run: this.runs[0] })) : []),
    ];
    const tables = lines.map((line) => {
      const [process, name] = split(line.key);
      const part = series[line.run]?.[process];
      const values = part?.columns[name];
      if (!values) return [[], []];
      const x =
        this.options.x === "step"
          ? part.step
          : part.time.map((time) => (time === null ? null : time - this.began(line.run)));
      return ordered(x, values);
    });
    return uPlot.join(tables);
  }

  began(run) {
    const times = Object.values(this.series[run] ?? {})
      .flatMap((part) => part.time.slice(0, 1))
      .filter((time) => time !== null);
    return times.length ? Math.min(...times) : 0;
  }

  // Where processes were started again: in red, or in the color of the run where there are several.
  marks() {
    return this.runs.flatMap((run, place) => {
      const began = this.began(run);
      const paint = this.runs.length > 1 ? PALETTE[place % PALETTE.length] : "--mark";
      return (this.detail[run]?.restarts ?? [])
        .filter((one) => one.step !== null)
        .map((one) => ({ at: this.options.x === "step" ? one.step : one.time - began, color: paint }));
    });
  }

  zoom(min, max) {
    this.range = [min, max];
    this.draw();
    this.loadSoon();
  }

  reset() {
    this.range = null;
    this.load();
  }

  filter() {
    for (const { chart } of this.charts.values())
      chart.node.hidden = !chart.title.toLowerCase().includes(this.options.filter);
    this.heats.forEach((heat) => {
      if (this.options.filter) heat.node.hidden = !heat.title.toLowerCase().includes(this.options.filter);
    });
  }

  async loadHeats() {
    if (this.closed) return;
    clearTimeout(this.timer);
    const done = await Promise.all(this.heats.map((heat) => heat.load().catch(() => true)));
    if (!this.closed && done.includes(false)) this.timer = setTimeout(() => this.loadHeats(), 3000);
  }

  async csv(panel) {
    const keys = keysOf([panel]);
    const whole = {};
    await Promise.all(
      this.runs.map(async (run) => {
        whole[run] = await this.fetch(run, keys, 200_000, null);
      }),
    );
    const table = this.table(panel, whole);
    const names = this.lines(panel).map((line) => (this.runs.length > 1 ? `${line.run} ${line.key}` : line.key));
    saveCsv(
      panel.title,
      [this.options.x, ...names, ...(table.length > names.length + 1 ? panel.band.map((line) => line.key) : [])],
      table,
    );
  }

  clear() {
    for (const { chart } of this.charts.values()) chart.destroy();
    this.painter.clear();
    this.heats = [];
    this.charts.clear();
    this.grid.replaceChildren();
  }
}

// Why a run failed, with the log of what failed.
function failure(run) {
  if (run.status !== "failed") return null;
  return h(
    "div",
    { class: "card pad failure" },
    h("b", { class: "bad" }, "This run failed. "),
    h("a", { href: run.failed_log ? runLink(run.name, "logs", run.failed_log) : runLink(run.name, "logs") }, "its log"),
    longText(run.reason || "Nobody recorded why."),
  );
}

// The settings in which runs differ.
async function settingsDifference(runs) {
  const all = await Promise.all(runs.map((run) => ofRun(run, "/settings").catch(() => ({ files: [] }))));
  const values = all.map(
    ({ files }) => new Map((files[0]?.settings ?? []).map((row) => [row.name, JSON.stringify(row.value)])),
  );
  const names = [...new Set(values.flatMap((one) => [...one.keys()]))].filter(
    (name) => !name.startsWith("run.") && new Set(values.map((one) => one.get(name))).size > 1,
  );
  return h(
    "section",
    { class: "card scroll difference", "aria-label": "Settings that differ" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, "Settings that differ"), runs.map((run) => h("th", {}, run)))),
      h(
        "tbody",
        {},
        names.length
          ? names
              .sort()
              .map((name) =>
                h(
                  "tr",
                  {},
                  h("td", { class: "mono" }, name),
                  values.map((one) => h("td", { class: "mono" }, visible(one.get(name) ?? "–"))),
                ),
              )
          : h("tr", {}, h("td", { class: "empty", colspan: runs.length + 1 }, "None: they differ only in name.")),
      ),
    ),
  );
}

// uPlot wants x to rise: times of a restarted process may step back, and steps may come twice when thinned.
function ordered(x, values) {
  const rows = x
    .map((at, row) => [at, values[row]])
    .filter(([at]) => at !== null)
    .sort((a, b) => a[0] - b[0]);
  const kept = rows.filter(([at], row) => row === rows.length - 1 || rows[row + 1][0] !== at);
  return [kept.map(([at]) => at), kept.map(([, value]) => value)];
}
