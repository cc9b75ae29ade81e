// Who works for a run from outside, how fast, what was accepted, what was refused and why, and the bytes moved.

import { ofRun, onChange } from "./api.js";
import { clock, h, number, replace, row, table, tile, visible } from "./dom.js";
import { runLink } from "./route.js";

const EVERY = 3000; // the ledger is written without a metric: changes of the run are not all that happens

export async function swarmView(box, run) {
  const draw = async () => {
    const swarm = await ofRun(run, "/swarm");
    if (swarm.problem) replace(box, h("p", { class: "empty" }, visible(swarm.problem)));
    else replace(box, tiles(swarm), workers(swarm), checks(swarm), reasons(swarm));
    return !swarm.problem;
  };
  const going = await draw();
  const again = () => draw().catch(() => {});
  const timer = going ? setInterval(again, EVERY) : null;
  const off = onChange((names) => names.has(run) && again());
  const close = () => {
    clearInterval(timer);
    off();
  };
  return { close, back: runLink(run) };
}

const percent = (share) => `${Math.round(100 * share)}%`;
const bytes = (count) => `${number(count / 1e6)} MB`;

const tiles = (swarm) =>
  h(
    "div",
    { class: "tiles" },
    tile("keys", number(swarm.keys)),
    tile("accepted", number(swarm.accepted)),
    tile("refused", number(swarm.refused)),
    tile("keys cut off", number(swarm.cut_off)),
    tile("tokens accepted", number(swarm.tokens)),
    tile("weights sent", bytes(swarm.weights_bytes)),
    tile("uploads", bytes(swarm.upload_bytes)),
  );

function workers(swarm) {
  const rows = swarm.workers.map((of) =>
    row(
      [
        visible(of.key.slice(0, 16)),
        number(of.tokens),
        number(of.per_second),
        number(of.accepted),
        number(of.refused),
        number(of.abandoned),
        number(of.open),
        number(of.strikes),
        of.cut_off ? "cut off" : percent(of.rescored),
        bytes(of.uploaded),
        of.last ? clock(of.last) : "",
      ],
      { class: of.cut_off ? "worker cut-off" : "worker" },
    ),
  );
  const titles = ["Worker", "Tokens", "Tokens/s", "Accepted", "Refused", "Abandoned", "Open", "Strikes", "Rescored"];
  return table([...titles, "Uploaded", "Last seen"], rows);
}

const checks = (swarm) =>
  table(
    ["Refused by", "Contributions"],
    Object.entries(swarm.refused_by).map(([check, count]) => row([visible(check), number(count)])),
  );

const reasons = (swarm) =>
  table(
    ["At", "Worker", "Refused by", "Why"],
    swarm.reasons.map((of) =>
      row([clock(of.at), visible(of.worker.slice(0, 16)), visible(of.check), visible(of.reason)], { class: "refusal" }),
    ),
  );
