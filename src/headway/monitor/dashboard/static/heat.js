// How often values occurred over steps, as a heat map: the shape of a distribution that a mean hides.

import { ofRun } from "./api.js";
import { saveCsv } from "./chart.js";
import { color, download, h, number } from "./dom.js";

export class Heat {
  // board: { size, painter }
  constructor(title, run, column, board) {
    Object.assign(this, { title, run, column, board, data: null });
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
    board.painter.add(this);
  }

  async load() {
    this.data = await ofRun(this.run, "/heat", { column: this.column, buckets: 120 });
    this.board.painter.want(this);
    const { indexed, steps } = this.data.progress;
    this.node.hidden = steps === 0;
    this.note.textContent = indexed < steps ? `read ${indexed} of ${steps} steps` : "";
    return indexed >= steps;
  }

  paint() {
    const { canvas, data } = this;
    if (!data?.counts.length) return false;
    const ratio = devicePixelRatio;
    const [width, height] = [this.board.size.width * ratio, this.board.size.height * ratio];
    Object.assign(canvas, { width, height });
    const ctx = canvas.getContext("2d");
    const [left, bottom] = [52 * ratio, height - 22 * ratio];
    const { counts, values, steps } = data;
    const [wide, high] = [(width - left - 6 * ratio) / counts.length, (bottom - 8 * ratio) / (values.length - 1)];
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(picture(counts), left, 8 * ratio, width - left - 6 * ratio, bottom - 8 * ratio);
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
    return true;
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
}

// The counts as a picture with a pixel for each, the darkest where most of a column's are: one image is drawn much faster
// than thousands of rectangles.
function picture(counts) {
  const [width, height] = [counts.length, counts[0].length];
  const small = h("canvas", { width, height });
  const ctx = small.getContext("2d");
  const image = ctx.createImageData(width, height);
  const ink = parseInt(color("--c1").slice(1), 16);
  counts.forEach((column, x) => {
    const most = Math.max(...column, 1);
    column.forEach((count, y) => {
      if (!count) return;
      const opacity = 255 * (0.12 + 0.88 * (count / most));
      image.data.set([ink >> 16, (ink >> 8) & 255, ink & 255, opacity], 4 * ((height - 1 - y) * width + x));
    });
  });
  ctx.putImageData(image, 0, 0);
  return small;
}
