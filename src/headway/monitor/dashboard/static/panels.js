// Which metrics make which chart. A panel whose metrics a run did not record is left out.

const O = "orchestrator";
const T = "trainer";

const line = (process, name, label, extra = {}) => ({ key: `${process}:${name}`, label, ...extra });

// One line per metric whose name matches; the label is what the pattern's group caught.
const each = (process, pattern, extra = {}) => ({ process, pattern, extra });

const PANELS = [
  { section: "Learning" },
  {
    title: "Reward",
    lines: [
      line(O, "reward/mean", "mean", { main: true }),
      each(O, /^reward\/(.+)\/mean$/, { several: true }),
      line(O, "reward/p50", "median", { off: true }),
    ],
    band: [line(O, "reward/p10", "10 %"), line(O, "reward/p90", "90 %")],
  },
  { title: "Evaluation", lines: [each(O, /^eval\/(.+\/(?:avg|pass@\d+))$/, { points: true })] },
  { title: "Pass rate", lines: [line(O, "pass_rate", "solved")] },
  { title: "Parts of the reward", lines: [each(O, /^rewards\/(.+)$/)] },
  {
    title: "Loss",
    lines: [
      line(T, "loss", "loss", { main: true }),
      each(T, /^loss\/(.+)$/, { several: true }),
      line("sft", "loss", "loss"),
      each(T, /^(validation\/.+)$/, { points: true }),
    ],
  },
  { title: "Entropy", lines: [line(T, "entropy", "entropy")] },
  { title: "Gradient norm", lines: [line(T, "grad_norm", "norm")], log: true },
  { title: "Learning rate", lines: [line(T, "lr", "lr")] },
  { section: "Staleness" },
  { title: "Mismatch KL, trainer against engines", lines: [line(T, "mismatch_kl", "KL", { main: true })] },
  { title: "Masked tokens", lines: [line(T, "rl/masked", "share")] },
  {
    title: "Lag (versions)",
    lines: [
      line(O, "lag/mean", "mean", { main: true }),
      line(O, "lag/max", "max"),
      line(O, "lag/in_flight_mean", "in flight"),
      line(O, "lag/in_queue_mean", "in queue"),
      line(O, "lag/in_flight_max", "in flight, max", { off: true }),
      line(O, "lag/in_queue_max", "in queue, max", { off: true }),
    ],
  },
  { title: "Lag of rollouts", heat: "lag" },
  { title: "Reward of rollouts", heat: "reward" },
  { section: "Speed" },
  {
    title: "Tokens per second",
    lines: [line(O, "tokens_per_second", "sampling"), line(T, "tokens_per_second", "training", { main: true })],
  },
  {
    title: "Who waited for whom (s)",
    lines: [
      line(T, "wait_seconds", "trainer for rollouts", { main: true }),
      line(O, "wait_for_trainer_seconds", "rollouts for trainer"),
    ],
  },
  {
    title: "Step (s)",
    lines: [
      line(T, "step_seconds", "trainer", { main: true }),
      line(O, "step_seconds", "orchestrator"),
      line(T, "publish_seconds", "publishing"),
    ],
  },
  {
    title: "Weight update (s)",
    lines: [line(O, "weights/update_seconds", "engines"), line(T, "publish_seconds", "publishing")],
  },
  {
    title: "Episodes",
    lines: [
      line(O, "in_flight", "in flight", { main: true }),
      line(O, "concurrency_cap", "cap"),
      line(O, "ready_episodes", "ready"),
    ],
  },
  { title: "MFU", lines: [line(T, "mfu", "MFU")] },
  { title: "Memory, trainer (GiB)", lines: [line(T, "peak_memory_gib", "peak")] },
  { section: "Episodes" },
  { title: "Errors by cause", lines: [each(O, /^errors\/(?!share$)(.+)$/)], raw: true },
  {
    title: "Dropped and cancelled by cause",
    lines: [
      each(O, /^(dropped\/(?!share$).+)$/),
      each(O, /^(cancelled\/(?!share$).+)$/),
      each(O, /^(samples_dropped\/.+)$/),
    ],
    raw: true,
  },
  {
    title: "Length (tokens)",
    lines: [line(O, "length/mean", "mean", { main: true }), line(O, "length/max", "max", { off: true })],
    band: [line(O, "length/p10", "10 %"), line(O, "length/p90", "90 %")],
  },
  {
    title: "Turns",
    lines: [line(O, "turns/mean", "mean", { main: true }), line(O, "turns/max", "max", { off: true })],
  },
  {
    title: "Where episodes spend time (s)",
    lines: [
      line(O, "episode_seconds/engine", "engines", { main: true }),
      line(O, "episode_seconds/environment", "environment"),
      line(O, "episode_seconds/reward", "scoring"),
    ],
  },
  {
    title: "Environment workers",
    lines: [line(O, "workers/serving", "serving", { main: true }), line(O, "workers/lost", "lost")],
    raw: true,
  },
  { title: "Sandboxes started per second", lines: [line(O, "sandboxes/starts_per_second", "starts")] },
  { title: "Sandboxes: seconds of an episode by phase", lines: [each(O, /^env\/(.+\/sandbox_seconds_.+)$/)] },
  { title: "Sandboxes: limits hit per episode", lines: [each(O, /^env\/(.+\/sandbox_limit_.+)$/)], raw: true },
  { title: "Truncated", lines: [line(O, "truncated", "share")] },
  { title: "Useful share of sampled tokens", lines: [line(O, "useful_share", "share")] },
  { title: "Experts", lines: [each(T, /^experts\/(.+)$/)] },
];

export const HEATS = PANELS.filter((panel) => panel.heat);

const MOST_LINES = 16;

// The panels that these processes ({ name: { names } }) have metrics for, with their lines spelled out. Metrics that no
// panel above names get a chart each, in sections by the first part of their names. Of several runs, each chart shows one
// metric, so that panels with several equal lines become several panels.
export function panelsFor(processes, several = false) {
  const has = (key) => {
    const [process, name] = [key.slice(0, key.indexOf(":")), key.slice(key.indexOf(":") + 1)];
    return processes[process]?.names.includes(name) ?? false;
  };
  const spell = (one) => {
    if (one.key) return has(one.key) ? [one] : [];
    const found = (processes[one.process]?.names ?? []).flatMap((name) => {
      const caught = one.pattern.exec(name);
      return caught ? [line(one.process, name, caught[1], one.extra)] : [];
    });
    return one.extra.several && found.length < 2 ? [] : found; // a part that is the whole
  };
  const out = [];
  for (const panel of PANELS) {
    if (panel.section) {
      out.push(panel);
      continue;
    }
    if (panel.heat) {
      if (processes[O]) out.push(panel);
      continue;
    }
    const lines = panel.lines.flatMap(spell);
    const band = panel.band?.every((one) => has(one.key)) ? panel.band : null;
    out.push(...divide({ ...panel, lines, band }, several && !lines.some((one) => one.main) ? 1 : MOST_LINES));
  }
  const shown = new Set(keysOf(out));
  out.push(...others(processes, shown));
  return out.filter((panel, place) => !panel.section || (out[place + 1] && !out[place + 1].section));
}

// A panel with many lines as panels with at most `most` each.
function divide(panel, most) {
  if (panel.lines.length <= most) return panel.lines.length ? [panel] : [];
  const starts = panel.lines.map((_, place) => place).filter((place) => place % most === 0);
  return starts.map((start) => {
    const lines = panel.lines.slice(start, start + most);
    const part = most === 1 ? lines[0].label : `${start + 1} – ${start + lines.length}`;
    return { ...panel, title: `${panel.title}: ${part}`, lines, band: null };
  });
}

// Sections of charts for the metrics that are not shown yet: those of environments first, then by process and prefix.
function others(processes, shown) {
  const sections = new Map();
  for (const [process, { names }] of Object.entries(processes)) {
    for (const name of names) {
      const key = `${process}:${name}`;
      if (shown.has(key)) continue;
      const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
      const title = prefix === "env" ? "Environment metrics" : [process, prefix].filter(Boolean).join(": ");
      const short = prefix ? name.slice(prefix.length + 1) : name;
      if (!sections.has(title)) sections.set(title, []);
      sections.get(title).push({ title: `${title}: ${short}`, lines: [line(process, name, short, { main: true })] });
    }
  }
  const order = (title) => (title === "Environment metrics" ? "" : title);
  return [...sections.entries()]
    .sort(([a], [b]) => order(a).localeCompare(order(b)))
    .flatMap(([section, panels]) => [{ section }, ...panels]);
}

export const keysOf = (panels) => [
  ...new Set(panels.flatMap((panel) => [...(panel.lines ?? []), ...(panel.band ?? [])].map((one) => one.key))),
];
