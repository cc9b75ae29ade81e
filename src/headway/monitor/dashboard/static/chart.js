// One chart: uPlot inside a card with a legend, marks, smoothing, a log scale and exports.

import { color, download, h, number, replace, swatch } from "./dom.js";

export const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

// A running mean that starts without bias and steps over gaps.
export function smooth(values, weight) {
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// The edge of a band in at most BAND points, each the farthest of its stretch; the rows between are left out.
const BAND = 100;

function coarse(values, farthest) {
  const stride = Math.ceil(values.length / BAND);
  if (stride === 1) return values;
  return values.map((_, row) => {
    if (row % stride && row !== values.length - 1) return undefined;
    const some = values.slice(row, row + stride).filter((value) => value !== null && value !== undefined);
    return some.length ? farthest(...some) : null;
  });
}

// Points from which on a line is drawn a pixel thin: nobody can tell in so dense a line, and wider strokes of it take a
// processor without graphics tens of milliseconds.
const DENSE = 300;

export class Chart {
  // lines: [{ label, color, points, dashed, off }]; board: { zoom(min, max), reset(), options, sync, size, painter, marks() }
  constructor(title, lines, board, { log = false, raw = false, band = null, csv = null } = {}) {
    Object.assign(this, { title, lines, board, log, raw, band, csv });
    this.hidden = new Set(lines.filter((line) => line.off).map((line) => line.label));
    this.plot = h("div", { class: "plot" });
    this.keys = h("div", { class: "keys" });
    this.logButton = h(
      "button",
      { "aria-pressed": String(log), title: "logarithmic scale", onclick: () => this.toggleLog() },
      "log",
    );
    this.node = h(
      "section",
      { class: "card chart", "aria-label": title },
      h(
        "div",
        { class: "head" },
        h("h3", {}, title),
        h("span", { class: "grow" }),
        this.logButton,
        h("button", { title: "save the picture", onclick: () => this.png() }, "PNG"),
        h("button", { title: "save the numbers", onclick: () => this.csv?.() }, "CSV"),
      ),
      this.plot,
      this.keys,
    );
    this.data = null;
    this.u = null;
    board.painter.add(this);
    this.legend(null); // so that the card has its height before it is drawn
  }

  // makeData() gives [x, ...one column per line, low and high of the band if there is one]; asked when it is drawn.
  setData(makeData, range) {
    this.makeData = makeData;
    this.range = range;
    this.board.painter.want(this);
  }

  paint() {
    if (!this.makeData) return;
    this.data = this.makeData();
    const shown = this.columns();
    const { options, size } = this.board;
    const shape = [shown.series.length, this.dense, this.log, options.x, options.smoothing > 0].join();
    if (this.u && this.shape === shape) {
      this.u.batch(() => {
        if (this.u.width !== size.width || this.u.height !== size.height) this.u.setSize(size);
        this.u.setData(shown.data, false);
        this.u.setScale("x", this.extent());
        this.u.setScale("y", { min: null, max: null });
      });
    } else {
      this.u?.destroy();
      this.u = new uPlot(this.config(shown), shown.data, this.plot);
      this.u.setScale("x", this.extent());
      this.shape = shape;
    }
    this.legend(null);
  }

  extent() {
    if (this.range) return { min: this.range[0], max: this.range[1] };
    const x = this.data[0];
    return { min: x[0] ?? 0, max: x.length > 1 ? x[x.length - 1] : (x[0] ?? 0) + 1 };
  }

  columns() {
    const [x, ...columns] = this.data;
    const { smoothing } = this.board.options;
    this.dense = x.length > DENSE;
    const positive = (column) =>
      this.log ? column.map((value) => (value > 0 ? value : value === undefined ? value : null)) : column;
    const data = [x];
    const series = [{}];
    const bands = [];
    if (this.band) {
      const [low, high] = columns.slice(this.lines.length);
      const fill = alpha(color(this.lines[0].color), 0.14);
      data.push(positive(coarse(high, Math.max)), positive(coarse(low, Math.min)));
      series.push(
        { label: "90 %", stroke: "transparent", points: { show: false }, spanGaps: true },
        { label: "10 %", stroke: "transparent", points: { show: false }, spanGaps: true },
      );
      bands.push({ series: [1, 2], fill });
    }
    this.lines.forEach((line, place) => {
      const stroke = color(line.color);
      const show = !this.hidden.has(line.label);
      const values = positive(columns[place]);
      const smoothed = smoothing > 0 && !line.points && !this.raw;
      if (smoothed) {
        data.push(values);
        series.push({
          label: line.label,
          show,
          stroke: alpha(stroke, 0.25),
          width: 1,
          points: { show: false },
          spanGaps: true,
          faint: true,
        });
      }
      data.push(smoothed ? smooth(values, smoothing) : values);
      series.push({
        label: line.label,
        show,
        stroke,
        width: this.dense && !smoothed ? 1 : 1.75,
        spanGaps: true,
        dash: line.dashed ? [5, 4] : undefined,
        points: { show: line.points || values.length < 3, size: 6 },
        main: place,
      });
    });
    return { data, series, bands };
  }

  config({ series, bands }) {
    const { board } = this;
    const axis = {
      stroke: color("--soft"),
      grid: { stroke: color("--line"), width: 1 },
      ticks: { stroke: color("--line"), width: 1 },
      font: `11px ${color("--sans")}`,
    };
    const shown = (u, values) => values.map((value) => (value === null ? "" : number(value)));
    return {
      ...board.size,
      series,
      bands,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      // Only moves are shared: the board itself carries a selection to the other charts.
      cursor: {
        sync: { key: board.sync, filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: {
          dblclick: () => () => {
            board.reset();
            return null;
          },
        },
      },
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { distr: this.log ? 3 : 1 } },
      axes: [
        { ...axis, values: board.options.x === "time" ? (u, values) => values.map(hours) : undefined, size: 28 },
        { ...axis, values: shown, size: 60 },
      ],
      hooks: {
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            board.zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
        setCursor: [(u) => this.legend(u.cursor.idx)],
        draw: [(u) => this.marks(u)],
      },
    };
  }

  // Restarts: a dashed line where a process had to begin anew.
  marks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4, 4]);
    for (const { at, color: paint } of this.board.marks()) {
      ctx.strokeStyle = color(paint);
      const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  legend(at) {
    const place = at ?? (this.data?.[0].length ?? 0) - 1;
    const value = (line) => {
      if (!this.u) return null;
      const drawn = this.u.series.findIndex((one) => one.main === this.lines.indexOf(line));
      const column = this.u.data[drawn] ?? [];
      for (let row = place; row >= 0; row--) if (column[row] !== null && column[row] !== undefined) return column[row];
      return null;
    };
    const x = this.data?.[0][place];
    replace(
      this.keys,
      at === null || at === undefined
        ? null
        : h("span", {}, this.board.options.x === "time" ? hours(x) : `step ${number(x, 6)}`),
      this.lines.map((line) =>
        h(
          "button",
          {
            class: this.hidden.has(line.label) ? "off" : "",
            title: "show or hide",
            onclick: () => this.toggle(line.label),
          },
          swatch(color(line.color), line.dashed),
          `${line.label} ${number(value(line))}`,
        ),
      ),
    );
  }

  toggle(label) {
    this.hidden.has(label) ? this.hidden.delete(label) : this.hidden.add(label);
    this.shape = null;
    this.paint();
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.paint();
  }

  png() {
    const from = this.plot.querySelector("canvas");
    if (!from) return;
    const ratio = devicePixelRatio;
    const to = h("canvas", { width: from.width, height: from.height + 30 * ratio });
    const ctx = to.getContext("2d");
    ctx.fillStyle = color("--card");
    ctx.fillRect(0, 0, to.width, to.height);
    ctx.fillStyle = color("--ink");
    ctx.font = `600 ${14 * ratio}px ${color("--sans")}`;
    ctx.fillText(this.title, 10 * ratio, 20 * ratio);
    ctx.drawImage(from, 0, 30 * ratio);
    to.toBlob((blob) => download(`${fileName(this.title)}.png`, blob));
  }

  destroy() {
    this.u?.destroy();
    this.u = null;
  }
}

export const fileName = (title) =>
  title
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-|-$/g, "");

export function saveCsv(title, names, columns) {
  const cell = (text) => (/[",\n]|^[=+@-](?![\d.])/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = [names.map(cell).join(",")];
  for (let row = 0; row < columns[0].length; row++) rows.push(columns.map((column) => column[row] ?? "").join(","));
  download(`${fileName(title)}.csv`, new Blob([rows.join("\n"), "\n"], { type: "text/csv" }));
}

export function alpha(hex, share) {
  const value = /^#([0-9a-f]{6})$/i.exec(hex);
  if (!value) return hex;
  const bits = parseInt(value[1], 16);
  return `rgba(${bits >> 16}, ${(bits >> 8) & 255}, ${bits & 255}, ${share})`;
}

function hours(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (Math.abs(seconds) < 120) return `${number(seconds)} s`;
  return Math.abs(seconds) < 7200 ? `${number(seconds / 60)} min` : `${number(seconds / 3600)} h`;
}
