// Building the page. Whatever comes from a run becomes a text node or an attribute value, never markup.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "value" || name === "checked" || name === "disabled" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(node, child);
    else if (child !== null && child !== undefined && child !== false) node.append(child);
  }
}

export function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

// A swatch of a color; CSP forbids style attributes in markup, and SVG's own attributes need none.
export function swatch(color, dashed = false) {
  const box = document.createElementNS(SVG, "svg");
  box.setAttribute("viewBox", "0 0 12 12");
  box.setAttribute("preserveAspectRatio", "none");
  box.setAttribute("aria-hidden", "true");
  const shape = document.createElementNS(SVG, "rect");
  for (const [name, value] of [
    ["width", dashed ? 5 : 12],
    ["height", 12],
    ["fill", color],
  ])
    shape.setAttribute(name, value);
  box.append(shape);
  return box;
}

export function meter(share) {
  const box = document.createElementNS(SVG, "svg");
  box.setAttribute("class", "meter");
  box.setAttribute("viewBox", "0 0 100 10");
  box.setAttribute("preserveAspectRatio", "none");
  box.setAttribute("aria-hidden", "true");
  for (const [width, fill] of [
    [100, "var(--line)"],
    [100 * Math.min(1, Math.max(0, share)), "var(--accent)"],
  ]) {
    const bar = document.createElementNS(SVG, "rect");
    for (const [name, value] of [
      ["width", width],
      ["height", 10],
      ["fill", fill],
    ])
      bar.setAttribute(name, value);
    box.append(bar);
  }
  return box;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 4 : digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

export const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hour12: false });

// Values of CSS variables. Asking the browser makes it lay out the page, so each is asked for once per theme.
const colors = new Map();

export function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colors.get(name);
}

export const forgetColors = () => colors.clear();

// Control and direction characters made visible: a model may sample any of them to fool a reader.
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (char) =>
      char < " "
        ? String.fromCharCode(0x2400 + char.charCodeAt(0))
        : `⟨U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

const SHOWN = 20_000;

// Text of any length: a long one is cut, and shown whole only when asked for.
export function longText(text, className = "text") {
  const box = h("div", { class: className });
  if (text.length <= SHOWN) {
    box.textContent = visible(text);
    return box;
  }
  box.textContent = visible(text.slice(0, SHOWN));
  const more = h(
    "button",
    {
      onclick: () => {
        box.textContent = visible(text);
        more.remove();
      },
    },
    `show all ${text.length.toLocaleString("en")} characters`,
  );
  return h("div", {}, box, more);
}

export const tile = (title, value) =>
  h("div", { class: "card tile" }, h("span", { class: "soft" }, title), h("b", {}, value));

export const table = (titles, rows) =>
  h(
    "div",
    { class: "card scroll" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title) => h("th", {}, title)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );

export const row = (cells, props = {}) =>
  h(
    "tr",
    props,
    cells.map((cell) => h("td", {}, cell)),
  );

export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function notice(text) {
  document.getElementById("notice").textContent = text;
}

export function debounce(action, wait) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), wait);
  };
}
