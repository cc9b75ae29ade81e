// What a run has cost so far: energy, money, and where the time of trainer and engines went.

import { ofRun, onChange } from "./api.js";
import { duration, h, meter, number, replace, row, table, tile } from "./dom.js";
import { runLink } from "./route.js";

export async function costView(box, run) {
  const draw = async () => {
    const cost = await ofRun(run, "/cost");
    replace(box, tiles(cost), entries(cost), rates(cost));
  };
  await draw();
  const off = onChange((names) => names.has(run) && draw().catch(() => {}));
  return { close: off, back: runLink(run) };
}

const money = (cost, value) => (cost.priced ? `${number(value)} ${cost.currency}` : "no price");

function tiles(cost) {
  const share = cost.joules ? cost.estimated_joules / cost.joules : 1;
  const how = share === 0 ? "measured" : share === 1 ? "an estimate" : `${Math.round(100 * share)}% an estimate`;
  return h(
    "div",
    { class: "tiles" },
    tile("time", duration(cost.seconds)),
    tile("devices", `${number(cost.devices)} ${cost.device}s`),
    tile(`energy, ${how}`, `${number(cost.joules / 3.6e6)} kWh`),
    tile("money", money(cost, cost.money)),
    tile("of it idle", money(cost, cost.idle_money)),
  );
}

function entries(cost) {
  const rows = cost.entries.map((entry) =>
    row(
      [
        entry.who,
        entry.what,
        duration(entry.seconds),
        meter(cost.seconds ? entry.seconds / cost.seconds : 0),
        money(cost, entry.money),
      ],
      { class: entry.idle ? "idle" : null },
    ),
  );
  return table(["Who", "What", "Time", "Share", "Money"], rows);
}

const rates = (cost) =>
  table(
    ["Per", "Energy", "Money"],
    cost.rates.map(([name, value, joules]) => row([name, `${number(joules)} J`, money(cost, value)])),
  );
