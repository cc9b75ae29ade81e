// Lanes: what every process was doing when. A stall is a long stretch of waiting, a restart a dashed line.

import { ofRun, onChange } from "./api.js";
import { alpha } from "./chart.js";
import { clock, color, duration, h, number, replace, swatch } from "./dom.js";

const KINDS = {
  step: "--c1",
  publish: "--c4",
  collect: "--c3",
  serve: "--c6",
  "update weights": "--c5",
  "in engines": "--c8",
  "in environments": "--c3",
  scoring: "--c4",
  "wait for rollouts": "--c2",
  "wait for trainer": "--c7",
};
const LEFT = 110;
const ROW = 34;
const LEVEL = 52;

export const lanesView = (box, run) => new Lanes(box, run).start();

class Lanes {
  constructor(box, run) {
    Object.assign(this, { box, run, range: null, data: null, drag: null });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": "timeline of processes; arrows move, plus and minus zoom, zero shows all",
    });
    this.tip = h("div", { class: "tip", hidden: true });
    this.stalls = h("div", { class: "card pad scroll" });
  }

  async start() {
    await this.load();
    replace(
      this.box,
      h(
        "div",
        { class: "bar" },
        h("h1", {}, "What each process did, and when"),
        h("button", { onclick: () => this.zoom(null) }, "Show all"),
        h("button", { onclick: () => this.zoom(this.last(120)) }, "Last 2 minutes"),
        h("span", { class: "soft wide" }, "drag to zoom; ← → + − with the keyboard"),
      ),
      h(
        "div",
        { class: "legend" },
        Object.entries(KINDS).map(([kind, name]) => h("span", {}, swatch(color(name)), kind)),
        h("span", {}, swatch(color("--mark"), true), "restart"),
      ),
      h("div", { class: "card lanes" }, this.canvas, this.tip),
      h("h2", { class: "pad" }, "Longest waits"),
      this.stalls,
    );
    this.listen();
    this.draw();
    this.longest();
    const watch = new ResizeObserver(() => this.draw());
    watch.observe(this.canvas.parentElement);
    const off = onChange(async (names) => {
      if (names.has(this.run)) {
        await this.load().catch(() => {});
        this.draw();
        this.longest();
      }
    });
    return {
      close: () => {
        off();
        watch.disconnect();
      },
      keys: (key) => this.key(key),
      back: "#/",
    };
  }

  async load() {
    const zoom = this.range ? { from: this.range[0], to: this.range[1] } : {};
    this.data = await ofRun(this.run, "/lanes", zoom);
    if (!this.range) {
      const spans = this.data.lanes.flatMap((lane) => lane.spans);
      this.whole = spans.length
        ? [Math.min(...spans.map((span) => span[0])), Math.max(...spans.map((span) => span[1]))]
        : [0, 1];
    }
  }

  get view() {
    return this.range ?? this.whole;
  }
  last(seconds) {
    return [Math.max(this.whole[0], this.whole[1] - seconds), this.whole[1]];
  }

  async zoom(range) {
    this.range = range;
    this.draw();
    await this.load().catch(() => {});
    this.draw();
  }

  x(time) {
    const [from, to] = this.view;
    return LEFT + ((time - from) / (to - from || 1)) * (this.canvas.clientWidth - LEFT - 8);
  }

  time(x) {
    const [from, to] = this.view;
    return from + ((x - LEFT) / (this.canvas.clientWidth - LEFT - 8)) * (to - from);
  }

  draw() {
    const { canvas, data } = this;
    const height = data.lanes.length * ROW + data.levels.length * LEVEL + 30;
    const ratio = devicePixelRatio;
    canvas.style.height = `${height}px`;
    Object.assign(canvas, { width: canvas.clientWidth * ratio, height: height * ratio });
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = `12px ${color("--sans")}`;
    this.paints = Object.fromEntries(Object.entries(KINDS).map(([kind, name]) => [kind, color(name)]));
    data.lanes.forEach((lane, row) => this.lane(ctx, lane, row * ROW));
    data.levels.forEach((level, row) => this.level(ctx, level, data.lanes.length * ROW + row * LEVEL));
    this.axis(ctx, height);
  }

  lane(ctx, lane, top) {
    ctx.fillStyle = color("--ink");
    ctx.fillText(lane.name, 4, top + ROW / 2 + 4);
    const [left, right] = [LEFT, this.canvas.clientWidth - 8];
    for (const [from, to, kind] of lane.spans) {
      const [start, end] = [Math.max(left, this.x(from)), Math.min(right, this.x(to))];
      if (end < left || start > right) continue;
      ctx.fillStyle = this.paints[kind];
      ctx.fillRect(start, top + 5, Math.max(0.6, end - start), ROW - 10);
    }
    ctx.fillStyle = color("--mark");
    const [from, to] = this.view;
    for (const [time] of lane.lost ?? []) if (time >= from && time <= to) ctx.fillRect(this.x(time) - 1, top, 3, ROW);
  }

  level(ctx, { name, times, values }, top) {
    ctx.fillStyle = color("--ink");
    ctx.fillText(name.split(",")[0], 4, top + 20);
    ctx.fillStyle = color("--soft");
    const most = Math.max(...values, 1e-9);
    ctx.fillText(`max ${number(most)}`, 4, top + 36);
    ctx.fillStyle = alpha(color("--c8"), 0.45);
    ctx.beginPath();
    ctx.moveTo(LEFT, top + LEVEL - 4);
    times.forEach((time, row) => {
      // a value is the mean of the step that ended then
      const y = top + LEVEL - 4 - (values[row] / most) * (LEVEL - 12);
      ctx.lineTo(Math.max(LEFT, this.x(times[row - 1] ?? time)), y);
      ctx.lineTo(Math.max(LEFT, this.x(time)), y);
    });
    if (times.length) ctx.lineTo(this.x(times[times.length - 1]), top + LEVEL - 4);
    ctx.fill();
  }

  axis(ctx, height) {
    const [from, to] = this.view;
    ctx.fillStyle = color("--soft");
    ctx.textAlign = "center";
    const ticks = Math.max(2, Math.floor((this.canvas.clientWidth - LEFT) / 130));
    for (let part = 0; part <= ticks; part++) {
      const time = from + ((to - from) * part) / ticks;
      ctx.fillText(clock(time), Math.min(this.x(time), this.canvas.clientWidth - 30), height - 8);
    }
    ctx.textAlign = "left";
    ctx.strokeStyle = color("--mark");
    ctx.setLineDash([4, 4]);
    for (const restart of this.data.restarts) {
      if (restart.time === null || restart.time < from || restart.time > to) continue;
      ctx.beginPath();
      ctx.moveTo(this.x(restart.time), 0);
      ctx.lineTo(this.x(restart.time), height - 22);
      ctx.stroke();
    }
    ctx.setLineDash([]);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => (this.drag === null ? this.hover(event) : this.select(event)));
    canvas.addEventListener("pointerup", (event) => {
      const [from, to] = [this.drag, event.offsetX].sort((a, b) => a - b);
      this.drag = null;
      if (to - from > 5) this.zoom([this.time(from), this.time(to)]);
    });
    canvas.addEventListener("dblclick", () => this.zoom(null));
    canvas.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
    });
  }

  select(event) {
    this.draw();
    const ctx = this.canvas.getContext("2d");
    ctx.fillStyle = alpha(color("--accent"), 0.2);
    ctx.fillRect(this.drag, 0, event.offsetX - this.drag, this.canvas.clientHeight);
  }

  hover(event) {
    const lane = this.data.lanes[Math.floor(event.offsetY / ROW)];
    const time = this.time(event.offsetX);
    const span = lane?.spans.find(([from, to]) => from <= time && time <= to);
    const restart = this.data.restarts.find(
      (one) => one.time !== null && Math.abs(this.x(one.time) - event.offsetX) < 4,
    );
    const lost = lane?.lost?.find(([at]) => Math.abs(this.x(at) - event.offsetX) < 4);
    this.tip.hidden = !span && !restart && !lost;
    if (this.tip.hidden) return;
    if (restart) this.tip.textContent = `${restart.process} started again (${restart.attempt})\n${clock(restart.time)}`;
    else if (lost) this.tip.textContent = `${lost[1]} workers lost by then\nstep ${lost[2]}\n${clock(lost[0])}`;
    else this.tip.textContent = `${lane.name}: ${span[2]}\n${size(lane, span)}, step ${span[3]}\n${clock(span[0])}`;
    this.tip.style.left = `${Math.min(event.offsetX + 14, this.canvas.clientWidth - 170)}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }

  longest() {
    const waits = this.data.lanes
      .flatMap((lane) => lane.spans.filter((span) => span[2].startsWith("wait")).map((span) => [lane.name, ...span]))
      .sort((a, b) => b[2] - b[1] - (a[2] - a[1]))
      .slice(0, 5);
    replace(
      this.stalls,
      waits.length
        ? h(
            "table",
            {},
            h(
              "tbody",
              {},
              waits.map(([name, from, to, kind, step]) =>
                h(
                  "tr",
                  {},
                  h("td", {}, name),
                  h("td", {}, kind),
                  h("td", { class: "num" }, duration(to - from)),
                  h("td", {}, `step ${step}`),
                  h(
                    "td",
                    {},
                    h(
                      "button",
                      { onclick: () => this.zoom([from - (to - from) * 0.3 - 1, to + (to - from) * 0.3 + 1]) },
                      "Show",
                    ),
                  ),
                ),
              ),
            ),
          )
        : "No process waited.",
    );
  }

  key(key) {
    const [from, to] = this.view;
    const size = to - from;
    if (key === "ArrowLeft") this.zoom([from - size / 4, to - size / 4]);
    else if (key === "ArrowRight") this.zoom([from + size / 4, to + size / 4]);
    else if (key === "+" || key === "=") this.zoom([from + size / 4, to - size / 4]);
    else if (key === "-") this.zoom([from - size / 2, to + size / 2]);
    else if (key === "0") this.zoom(null);
    else return false;
    return true;
  }
}

// How long a span is; where spans are shares of a step, how large a share, if all of them are here.
function size(lane, [from, to, , step]) {
  if (!lane.shares) return duration(to - from);
  if (lane.thinned) return "zoom in for its share";
  const whole = lane.spans.filter((span) => span[3] === step).reduce((sum, span) => sum + span[1] - span[0], 0);
  return `${Math.round((100 * (to - from)) / whole)} % of episodes' time`;
}
