// Two rollouts of a group side by side, with the words in which they differ.

import { rewards, turn } from "./conversation.js";
import { h, longText, number, replace, visible } from "./dom.js";

const MOST = 3000; // words of a side; longer texts are shown without marks

export function diffView(box, run, [leftLine, left], [rightLine, right]) {
  const sides = [sampledTurns(left), sampledTurns(right)];
  const marks = [new Map(), new Map()];
  for (let place = 0; place < Math.min(sides[0].length, sides[1].length); place++) {
    const pieces = diff(sides[0][place].message.content ?? "", sides[1][place].message.content ?? "");
    if (pieces) [0, 1].forEach((side) => marks[side].set(sides[side][place], pieces));
  }
  replace(
    box,
    h(
      "div",
      { class: "two" },
      [
        [leftLine, left, 0],
        [rightLine, right, 1],
      ].map(([line, record, side]) =>
        h(
          "section",
          { class: "card pad" },
          h(
            "h3",
            {},
            `rollout ${line}`,
            " ",
            h(
              "span",
              { class: "soft" },
              `reward ${number(record.reward)}, advantage ${record.samples.map((one) => number(one.advantage)).join(", ") || "–"}`,
            ),
          ),
          record.episode.traces.map((trace) => [
            h("div", { class: "soft" }, rewards(trace)),
            path(trace).map((node) =>
              turn(node, run, (text) => (marks[side].has(node) ? marked(marks[side].get(node), side) : longText(text))),
            ),
          ]),
        ),
      ),
    ),
  );
}

const path = (trace) => (trace.branches[trace.branches.length - 1] ?? []).map((node) => trace.nodes[node]);
const sampledTurns = (record) => record.episode.traces.flatMap(path).filter((node) => node.sampled && node.message);

function marked(pieces, side) {
  return h(
    "div",
    { class: "text" },
    pieces.map(([kind, text]) => {
      if (kind === 0) return visible(text);
      return kind < 0 === (side === 0) ? h(side === 0 ? "del" : "ins", {}, visible(text)) : null;
    }),
  );
}

// Pieces [kind, text] with kind -1 only left, 0 both, 1 only right; null where the texts are too long to compare.
export function diff(left, right) {
  if (left.length + right.length > 200_000) return null;
  const cut = (text) => text.match(/\s+|[\p{L}\p{N}_]+|./gsu) ?? [];
  let [a, b] = [cut(left), cut(right)];
  if (a.length < 12 && b.length < 12) [a, b] = [[...left], [...right]];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const [middleA, middleB] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  if (middleA.length > MOST || middleB.length > MOST) return null;
  return [[0, a.slice(0, start).join("")], ...align(middleA, middleB), [0, a.slice(a.length - end).join("")]].filter(
    ([, text]) => text,
  );
}

// The longest common subsequence, by the table of lengths of its tails.
function align(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] =
        a[i] === b[j]
          ? best[(i + 1) * width + j + 1] + 1
          : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const out = [];
  const put = (kind, word) => {
    if (out.length && out[out.length - 1][0] === kind) out[out.length - 1][1] += word;
    else out.push([kind, word]);
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      put(0, a[i]);
      i++;
      j++;
    } else if (j >= b.length || (i < a.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) put(-1, a[i++]);
    else put(1, b[j++]);
  }
  return out;
}
