// Logs of a run's processes: the end of a file that grows, more upwards, and a search.

import { ofRun, onChange } from "./api.js";
import { debounce, h, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

const MOST = 5000; // lines kept on the page

export async function logsView(box, run, query, [wanted]) {
  const files = await ofRun(run, "/logs");
  if (!files.length) {
    replace(box, h("p", { class: "empty" }, "No logs yet."));
    return { back: "#/" };
  }
  const name =
    files.find((file) => file.name === wanted)?.name ??
    (files.findLast((file) => file.name.startsWith("trainer")) ?? files[0]).name;
  const state = { piece: null, text: "", follow: true };
  const log = h("div", { class: "log card", tabindex: 0, role: "log", "aria-label": name });
  const status = h("span", { class: "soft" });
  const older = h("button", { onclick: () => up() }, "older lines");
  const paint = (line) =>
    h(
      "div",
      {
        class: /\b(ERROR|CRITICAL|Traceback)\b|"level": "(error|critical)"/.test(line)
          ? "bad"
          : /\bWARNING\b|"level": "warning"/.test(line)
            ? "warn"
            : "",
      },
      visible(line),
    );
  const down = () => {
    if (state.follow) log.scrollTop = log.scrollHeight;
  };

  const load = async () => {
    state.piece = await ofRun(run, `/logs/${encodeURIComponent(name)}`, { q: state.text });
    replace(log, state.piece.lines.map(paint));
    older.hidden = Boolean(state.text) || state.piece.start === 0;
    status.textContent = state.text
      ? `${state.piece.total} lines contain it`
      : `${state.piece.size.toLocaleString("en")} bytes`;
    down();
  };
  const up = async () => {
    const piece = await ofRun(run, `/logs/${encodeURIComponent(name)}`, { end: state.piece.start });
    const height = log.scrollHeight;
    log.prepend(...piece.lines.map(paint));
    log.scrollTop += log.scrollHeight - height;
    state.piece.start = piece.start;
    older.hidden = piece.start === 0;
  };
  const grow = async () => {
    if (state.text || !state.piece) return;
    const piece = await ofRun(run, `/logs/${encodeURIComponent(name)}`, { since: state.piece.end });
    if (!piece.lines.length) return;
    log.append(...piece.lines.map(paint));
    state.piece.end = piece.end;
    status.textContent = `${piece.size.toLocaleString("en")} bytes`;
    while (log.childElementCount > MOST) log.firstElementChild.remove();
    down();
  };
  log.addEventListener("scroll", () => {
    state.follow = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  });
  const search = debounce((text) => {
    state.text = text;
    load();
  }, 200);
  replace(
    box,
    h(
      "div",
      { class: "bar" },
      h(
        "select",
        {
          "aria-label": "log file",
          onchange: (event) => {
            location.hash = runLink(run, "logs", event.target.value);
          },
        },
        files.map((file) => h("option", { value: file.name, selected: file.name === name }, file.name)),
      ),
      h("input", {
        type: "search",
        "data-search": true,
        placeholder: "search this log",
        "aria-label": "search this log",
        oninput: (event) => search(event.target.value),
      }),
      older,
      status,
    ),
    log,
  );
  await load();
  const off = onChange((names) => {
    if (names.has(run)) grow().catch(() => {});
  });
  return { close: off, back: runLink(run) };
}
