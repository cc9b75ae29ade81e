// What a run was predicted to do beside what it did, other layouts of it, and what other settings would change.

import { ofRun, onChange } from "./api.js";
import { h, number, replace, row, table, tile, visible } from "./dom.js";
import { runLink } from "./route.js";

const EVERY = 60_000; // a plan takes seconds of a core, which a run may need

export async function planView(box, run) {
  const draw = async () => {
    const plan = await ofRun(run, "/plan");
    if (plan.problem) replace(box, h("p", { class: "empty" }, visible(plan.problem)));
    else replace(box, tiles(plan), bottleneck(plan), splits(plan), changes(plan), assumptions(plan));
    return !plan.problem;
  };
  replace(box, h("p", { class: "soft", role: "status" }, "Planning; this takes some seconds."));
  let shown = await draw();
  let last = Date.now();
  const off = onChange(async (names) => {
    if (!names.has(run) || (shown && Date.now() - last < EVERY)) return;
    last = Date.now();
    shown = await draw().catch(() => shown);
  });
  return { close: off, back: runLink(run) };
}

const seconds = (value) => `${number(value)} s`;
const percent = (share) => `${Math.round(100 * share)}%`;
const signed = (share) => `${share < 0 ? "\u2212" : "+"}${percent(Math.abs(share))}`;

const nearest = (plan) => plan.own ?? plan.fastest;

function tiles(plan) {
  const { forecast } = nearest(plan);
  const seen = plan.measured;
  return h(
    "div",
    { class: "tiles" },
    tile("a step, predicted", seconds(forecast.step_seconds)),
    seen && tile("a step, measured", seconds(seen.step_seconds)),
    seen && plan.error !== null && tile("prediction off by", signed(plan.error)),
    tile("lag, predicted", number(forecast.lag_mean)),
    seen && tile("lag, measured", number(seen.lag_mean)),
    tile("trainer waits", percent(forecast.trainer_waiting)),
    tile("engines idle", percent(forecast.engines_idle)),
  );
}

const bottleneck = (plan) => h("p", { class: "pad" }, h("b", {}, "Bottleneck: "), visible(plan.bottleneck));

function splits(plan) {
  const same = (one, other) =>
    one && ["trainer_ranks", "engines", "gpus_each"].every((name) => one[name] === other[name]);
  const spent = (one) =>
    plan.priced ? `${number(one.money)} ${plan.currency}` : seconds(one.devices * one.forecast.step_seconds);
  const marks = (one) =>
    [
      same(plan.own, one) && "as in the settings",
      same(plan.fastest, one) && "finishes first",
      same(plan.cheapest, one) && "costs least",
    ]
      .filter(Boolean)
      .join(", ");
  const sorted = [...plan.splits].sort((a, b) => a.forecast.step_seconds - b.forecast.step_seconds);
  const rows = sorted.map((one) =>
    row(
      [
        layout(one),
        seconds(one.forecast.step_seconds),
        spent(one),
        percent(one.forecast.trainer_waiting),
        percent(one.forecast.engines_idle),
        number(one.forecast.lag_mean),
        marks(one),
      ],
      { class: "layout" },
    ),
  );
  const cost = plan.priced ? "Money a step" : "Device time a step";
  return table([`Layout (${visible(plan.device)})`, "Step", cost, "Trainer waits", "Engines idle", "Lag", ""], rows);
}

function layout(one) {
  const count = (number, word) => `${number} ${word}${number > 1 ? "s" : ""}`;
  const each = one.gpus_each > 1 ? ` of ${one.gpus_each} GPUs` : "";
  return `${count(one.trainer_ranks, "trainer rank")} + ${count(one.engines, "engine")}${each}`;
}

function changes(plan) {
  const before = nearest(plan).forecast.step_seconds;
  const rows = plan.changes.map(({ what, forecast, episodes }) =>
    row(
      [
        visible(what),
        seconds(forecast.step_seconds),
        signed(forecast.step_seconds / before - 1),
        number(episodes),
        number(forecast.lag_mean),
        percent(forecast.aged),
      ],
      { class: "change" },
    ),
  );
  return table(["If a setting were another", "Step", "Change", "Episodes a step", "Lag", "Grow too old"], rows);
}

const assumptions = (plan) =>
  h(
    "details",
    { class: "pad" },
    h("summary", {}, "Assumptions"),
    h(
      "ul",
      {},
      h("li", {}, `episodes: ${visible(plan.origin)}`),
      plan.assumptions.map((line) => h("li", {}, visible(line))),
    ),
  );
