// The settings a run was started with, and where each came from.

import { ofRun } from "./api.js";
import { h, replace, visible } from "./dom.js";
import { runLink } from "./route.js";

export async function settingsView(box, run) {
  const { argv, files, record } = await ofRun(run, "/settings");
  const state = { text: "", changed: false, file: 0 };
  const body = h("tbody");
  const draw = () => {
    const words = state.text.toLowerCase();
    const rows = (files[state.file]?.settings ?? []).filter(
      (row) =>
        (!state.changed || row.origin !== "default") &&
        `${row.name} ${JSON.stringify(row.value)}`.toLowerCase().includes(words),
    );
    replace(
      body,
      rows.map((row) =>
        h(
          "tr",
          {},
          h("td", { class: "mono" }, row.name),
          h("td", { class: "mono" }, JSON.stringify(row.value)),
          h("td", {}, h("span", { class: row.origin === "default" ? "soft" : "tag" }, row.origin)),
        ),
      ),
    );
  };
  replace(
    box,
    h(
      "div",
      { class: "card pad mono" },
      `headway ${argv.map((word) => (/[\s"'$]/.test(word) ? JSON.stringify(word) : word)).join(" ")}`,
      h(
        "div",
        { class: "soft" },
        ["headway", "commit", "python", "torch", "vllm", "gpus", "host", "user"]
          .filter((key) => record[key]?.length)
          .map((key) => `${key} ${visible(String(record[key]))}`)
          .join(" · "),
        record.attempts > 1 ? ` · attempt ${record.attempts}` : "",
      ),
    ),
    h(
      "div",
      { class: "bar pad" },
      h(
        "select",
        {
          "aria-label": "settings file",
          onchange: (event) => {
            state.file = Number(event.target.value);
            draw();
          },
        },
        files.map((file, value) => h("option", { value }, file.name)),
      ),
      h("input", {
        type: "search",
        "data-search": true,
        placeholder: "filter settings",
        "aria-label": "filter settings",
        oninput: (event) => {
          state.text = event.target.value;
          draw();
        },
      }),
      h(
        "label",
        {},
        h("input", {
          type: "checkbox",
          onchange: (event) => {
            state.changed = event.target.checked;
            draw();
          },
        }),
        "only what was set",
      ),
    ),
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
            ["Setting", "Value", "From"].map((title) => h("th", {}, title)),
          ),
        ),
        body,
      ),
    ),
  );
  draw();
  return { back: runLink(run) };
}
