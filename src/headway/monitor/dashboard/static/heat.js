// How often values occurred over steps, as a heat map: the shape of a distribution that a mean hides.

import { ofRun } from "./api.js";
import { alpha, saveCsv } from "./chart.js";
import { color, download, h, number } from "./dom.js";

export class Heat {
  constructor(title, run, column) {
    Object.assign(this, { title, run, column, data: null });
    this.canvas = h("canvas", { role: "img", "aria-label": `${title} over steps` });
    this.note = h("div", { class: "keys" });
    this.node = h(
      "section",
      { class: "card chart", "aria-label": title },
      h(
        "div",
        { class: "head" },
        h("h3", {}, title),
        h("span", { class: "grow" }),
        h(
          "button",
          { title: "save the picture", onclick: () => this.canvas.toBlob((blob) => download(`${column}.png`, blob)) },
          "PNG",
        ),
        h("button", { title: "save the numbers", onclick: () => this.csv() }, "CSV"),
      ),
      h("div", { class: "plot" }, this.canvas),
      this.note,
    );
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
  }

  async load() {
    this.data = await ofRun(this.run, "/heat", { column: this.column, buckets: 120 });
    this.draw();
    const { indexed, steps } = this.data.progress;
    this.node.hidden = steps === 0;
    this.note.textContent = indexed < steps ? `read ${indexed} of ${steps} steps` : "";
    return indexed >= steps;
  }

  draw() {
    const { canvas, data } = this;
    const ratio = devicePixelRatio;
    const [width, height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio];
    if (!data || !width) return;
    Object.assign(canvas, { width, height });
    const ctx = canvas.getContext("2d");
    const [left, bottom] = [52 * ratio, height - 22 * ratio];
    const { counts, values, steps } = data;
    if (!counts.length) return;
    const [wide, high] = [(width - left - 6 * ratio) / counts.length, (bottom - 8 * ratio) / (values.length - 1)];
    const ink = color("--c1");
    counts.forEach((column, x) => {
      const most = Math.max(...column, 1);
      column.forEach((count, y) => {
        if (!count) return;
        ctx.fillStyle = alpha(ink, 0.12 + 0.88 * (count / most));
        ctx.fillRect(left + x * wide, bottom - (y + 1) * high, Math.ceil(wide), Math.max(1, high - ratio));
      });
    });
    this.area = { left: left / ratio, bottom: bottom / ratio, wide: wide / ratio, high: high / ratio };
    ctx.fillStyle = color("--soft");
    ctx.font = `${11 * ratio}px ${color("--sans")}`;
    ctx.textAlign = "right";
    const every = Math.max(1, Math.ceil((values.length - 1) / 6));
    for (let y = 0; y < values.length - 1; y += every) {
      const label = this.column === "lag" ? values[y] + 0.5 : values[y];
      ctx.fillText(number(label), left - 6 * ratio, bottom - (y + 0.5) * high + 4 * ratio);
    }
    ctx.textAlign = "center";
    for (let part = 0; part <= 4; part++) {
      const at = steps[0] + (part / 4) * (steps[steps.length - 1] - 1 - steps[0]);
      ctx.fillText(
        number(Math.round(at), 6),
        left + (part / 4) * (width - left - 24 * ratio) + 8 * ratio,
        height - 6 * ratio,
      );
    }
  }

  hover(event) {
    if (!this.area || !this.data) return;
    const x = Math.floor((event.offsetX - this.area.left) / this.area.wide);
    const y = Math.floor((this.area.bottom - event.offsetY) / this.area.high);
    const column = this.data.counts[x];
    if (!column || column[y] === undefined) return;
    const value = this.column === "lag" ? y : `${number(this.data.values[y])} to ${number(this.data.values[y + 1])}`;
    this.note.textContent = `step ${number(Math.floor(this.data.steps[x]), 6)}: ${this.column} ${value}: ${column[y]} of ${column.reduce((a, b) => a + b, 0)}`;
  }

  csv() {
    const { counts, values, steps } = this.data;
    const names = ["step", ...values.slice(0, -1).map((low, y) => `${this.column} ${low} to ${values[y + 1]}`)];
    saveCsv(this.title, names, [
      steps.slice(0, -1),
      ...values.slice(0, -1).map((_, y) => counts.map((column) => column[y])),
    ]);
  }

  destroy() {
    this.watch.disconnect();
  }
}
