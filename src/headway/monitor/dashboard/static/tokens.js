// A rollout token by token, colored by what was recorded about each; context that was not sampled stays gray.

import { ofRun } from "./api.js";
import { alpha } from "./chart.js";
import { color, h, number, replace, visible } from "./dom.js";

const SHADES = ["logprob", "ratio", "version", "advantage", "mask"];
const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

export class Tokens {
  constructor(box, run, at, record) {
    Object.assign(this, { box, run, at, record, trace: 0, branch: 0, parts: [] });
    this.shade = localStorage.getItem("shade") ?? "logprob";
    this.list = h("div", { class: "tokens card pad" });
    this.about = h("div", { class: "bar soft mono", role: "status" }, "point at a token");
    this.more = h("button", { onclick: () => this.load() });
  }

  async start() {
    const branches = this.record.episode.traces.flatMap((trace, t) =>
      trace.branches.map((_, b) => [
        t,
        b,
        `${trace.agent ?? "policy"}${trace.branches.length > 1 ? `, branch ${b + 1}` : ""}`,
      ]),
    );
    replace(
      this.box,
      h(
        "div",
        { class: "bar" },
        h(
          "label",
          {},
          "color by",
          h(
            "select",
            {
              id: "shade",
              "aria-label": "color by",
              onchange: (event) => {
                this.shade = event.target.value;
                localStorage.setItem("shade", this.shade);
                this.draw();
              },
            },
            SHADES.map((value) => h("option", { value, selected: value === this.shade }, value)),
          ),
        ),
        branches.length > 1
          ? h(
              "select",
              {
                "aria-label": "agent and branch",
                onchange: (event) => {
                  [this.trace, this.branch] = branches[event.target.value];
                  this.parts = [];
                  this.load();
                },
              },
              branches.map(([, , title], value) => h("option", { value }, title)),
            )
          : null,
      ),
      this.about,
      this.list,
      this.more,
    );
    await this.load();
  }

  async load() {
    const offset = this.parts.reduce((sum, part) => sum + part.ids.length, 0);
    this.parts.push(await ofRun(this.run, `${this.at}/tokens`, { trace: this.trace, branch: this.branch, offset }));
    this.draw();
  }

  draw() {
    const shown = this.parts.reduce((sum, part) => sum + part.ids.length, 0);
    const { total, advantage } = this.parts[0];
    const known = [...new Set(this.parts.flatMap((part) => part.versions).filter((version) => version !== null))].sort(
      (a, b) => a - b,
    );
    replace(
      this.list,
      this.parts.flatMap((part) => part.ids.map((id, place) => this.token(part, place, advantage, known))),
    );
    if (this.shade === "ratio" && this.parts.every((part) => part.ratios.every((one) => one === null)))
      this.about.textContent = "the trainer kept no logprobs of this rollout (trainer.record_logprobs)";
    this.more.hidden = shown >= total;
    this.more.textContent = `show more (${shown} of ${total})`;
  }

  token(part, place, advantage, known) {
    const [logprob, version, text] = [part.logprobs[place], part.versions[place], part.texts[place]];
    const ratio = part.ratios[place];
    const sampled = logprob !== null;
    const node = h(
      "span",
      { class: sampled ? "tok" : "tok context", tabindex: sampled ? 0 : null },
      visible(text).slice(0, 400),
    );
    const tell = () => {
      this.about.textContent = `${part.offset + place}: ${JSON.stringify(text).slice(0, 80)}  id ${part.ids[place]}  ${
        sampled
          ? `logprob ${number(logprob)} (p ${number(Math.exp(logprob))})  ratio ${number(ratio, 5)}  version ${version}  advantage ${number(advantage)}`
          : "not sampled, not trained"
      }`;
    };
    node.addEventListener("mouseenter", tell);
    node.addEventListener("focus", tell);
    const fill = sampled ? this.fill({ logprob, ratio, version, advantage }, known) : null;
    if (fill) node.style.backgroundColor = fill;
    return node;
  }

  fill({ logprob, ratio, version, advantage }, known) {
    if (this.shade === "ratio") return ratio === null ? null : ratioColor(ratio);
    if (this.shade === "logprob") return alpha(color("--bad"), Math.min(0.75, -logprob / 5));
    if (this.shade === "version") return alpha(color(PALETTE[known.indexOf(version) % PALETTE.length]), 0.35);
    if (this.shade === "mask") return alpha(color("--accent"), 0.3);
    if (advantage === null) return null;
    return alpha(color(advantage >= 0 ? "--good" : "--bad"), Math.min(0.7, 0.15 + Math.abs(advantage) * 0.5));
  }
}

// Green where the trainer finds a token likelier than the engine did, red where less; plain up to a thousandth apart,
// and full from a factor of two.
function ratioColor(ratio) {
  const apart = Math.abs(Math.log2(Math.max(ratio, 1e-9)));
  if (apart < 0.0015) return null;
  const share = Math.min(1, Math.max(0.08, 1 + Math.log10(apart) / 3));
  return alpha(color(ratio > 1 ? "--good" : "--bad"), 0.7 * share);
}
