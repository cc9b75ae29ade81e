// The page: a header, one view at a time chosen by the address, and the keyboard.

import { connected, Gone, onChange } from "./api.js";
import { auditView } from "./audit.js";
import { costView } from "./cost.js";
import { forgetColors, h, replace } from "./dom.js";
import { evaluationsView } from "./evaluations.js";
import { lanesView } from "./lanes.js";
import { logsView } from "./logs.js";
import { planView } from "./plan.js";
import { parse, runLink } from "./route.js";
import { rolloutView } from "./rollout.js";
import { rolloutsView } from "./rollouts.js";
import { compareView, runView } from "./run.js";
import { runsView } from "./runs.js";
import { settingsView } from "./settings.js";
import { stepsView } from "./steps.js";
import { swarmView } from "./swarm.js";

const TABS = [
  ["", "Charts", runView],
  ["lanes", "Lanes", lanesView],
  ["rollouts", "Rollouts", rolloutsView],
  ["evaluations", "Evaluations", evaluationsView],
  ["logs", "Logs", logsView],
  ["settings", "Settings", settingsView],
  ["audit", "Audit", auditView],
  ["cost", "Cost", costView],
  ["steps", "Steps", stepsView],
  ["plan", "Plan", planView],
  ["swarm", "Swarm", swarmView],
];
const KEYS = [
  ["?", "this list"],
  ["1 – 9, 0", "charts, lanes, rollouts, evaluations, logs, settings, audit, cost, steps, plan of a run"],
  ["h", "all runs"],
  ["/", "search or filter"],
  ["j k", "next and previous line"],
  ["Enter", "open the line"],
  ["x", "mark a run"],
  ["c", "compare marked runs"],
  ["[ ]", "previous and next page, step, or rollout of the group"],
  ["t", "light or dark"],
  ["Esc", "back, or leave a field"],
];

let shown = null; // the view on display: { close?, keys?, back? }
let turn = 0;

async function show() {
  const mine = ++turn;
  const { parts, query } = parse(location.hash);
  shown?.close?.();
  shown = null;
  header(parts);
  const main = replace(document.getElementById("main"));
  const box = h("div");
  main.append(box);
  try {
    const view = await choose(parts, query, box);
    if (mine === turn) shown = view;
    else view?.close?.();
  } catch (error) {
    if (mine !== turn) return;
    const text = error instanceof Gone ? "Not found; it may have been removed." : `An error occurred: ${error.message}`;
    replace(box, h("p", { class: "empty" }, text, " ", h("a", { href: "#/" }, "All runs")));
  }
  if (mine === turn) document.body.dataset.ready = location.hash || "#/";
}

function choose([kind, name, tab = "", ...rest], query, box) {
  document.title = name ? `${name} · Headway` : "Headway";
  if (kind === "compare") return compareView(box, (name ?? "").split(",").map(decodeURIComponent));
  if (kind !== "run" || !name) return runsView(box);
  if (tab === "rollout") return rolloutView(box, name, Number(rest[0]), Number(rest[1]), query);
  const known = TABS.find(([path]) => path === tab) ?? TABS[0];
  return known[2](box, name, query, rest);
}

function header([kind, name, tab = ""]) {
  const current = tab === "rollout" ? "rollouts" : tab;
  const tabs =
    kind === "run" && name
      ? [
          h("b", {}, name),
          h(
            "nav",
            { "aria-label": "Run" },
            TABS.map(([path, title]) =>
              h(
                "a",
                { href: path ? runLink(name, path) : runLink(name), "aria-current": path === current ? "page" : null },
                title,
              ),
            ),
          ),
        ]
      : [];
  replace(
    document.getElementById("top"),
    h("a", { class: "home", href: "#/" }, h("img", { src: "/static/icon.svg", alt: "" }), "Headway"),
    tabs,
    h("span", { class: "grow" }),
    h("span", { class: connected() ? "live on" : "live", title: "live: new lines appear by themselves" }),
    h("button", { id: "theme", title: "light or dark (t)", onclick: theme }, "◐"),
    h("button", { title: "keyboard (?)", onclick: help }, "?"),
  );
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  repaint();
}

function repaint() {
  forgetColors();
  show();
}

function help() {
  const dialog = document.getElementById("help");
  replace(
    dialog,
    h("h2", {}, "Keyboard"),
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        KEYS.map(([keys, text]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, text))),
      ),
    ),
    h("form", { method: "dialog" }, h("button", {}, "Close")),
  );
  dialog.showModal();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const field = event.target.closest("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  if (shown?.keys?.(event.key, event)) {
    event.preventDefault();
    return;
  }
  const { parts } = parse(location.hash);
  const tab = /^\d$/.test(event.key) ? TABS[(Number(event.key) + 9) % 10] : undefined;
  if (event.key === "?") help();
  else if (event.key === "t") theme();
  else if (event.key === "h") location.hash = "#/";
  else if (event.key === "/") document.querySelector("main [data-search]")?.focus();
  else if (event.key === "Escape") location.hash = shown?.back ?? "#/";
  else if (tab && parts[0] === "run") location.hash = tab[0] ? runLink(parts[1], tab[0]) : runLink(parts[1]);
  else return;
  event.preventDefault();
}

const saved = localStorage.getItem("theme");
if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
addEventListener("hashchange", show);
addEventListener("keydown", pressed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
onChange(() => {});
show();
