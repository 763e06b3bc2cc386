/** The panel of one round: what it wrote, what the target thought, the draft tree, and where the time went. */

import { byId, element, shape } from "./dom.js";
import { gloss, treeList } from "./tree.js";
import {
  ORIGINS, counted, decimal, knownOrigin, milliseconds, percent, readableText, visibleText,
} from "./wording.js";

const PARTS_OF_TIME = ["draft", "forward", "verify", "other"];

export class RoundPanel {
  #root = byId("round");
  #title = byId("round-title");
  #body = byId("round-body");
  #close = byId("round-close");
  #hint = [...this.#body.childNodes];

  /** `onClose` is called when the reader asks for the panel to go. */
  constructor(onClose) {
    this.#close.addEventListener("click", onClose);
  }

  get isOpen() {
    return this.#root.hasAttribute("data-open");
  }

  /** Show the round of a piece; `word` is where the reader points, which must stay in sight. */
  show(columnTitle, { token, round }, word) {
    this.#title.textContent = `Round ${round.round}`;
    this.#close.hidden = false;
    this.#body.replaceChildren(
      overview(columnTitle, round),
      choicePart(token, round),
      writtenPart(token, round),
      treePart(token, round),
      alternativesPart(token),
      timePart(round),
    );
    this.#body.scrollTop = 0;
    this.#root.setAttribute("data-open", "");
    this.#stayClearOf(word);
  }

  /** Back to the hint. */
  clear() {
    this.#title.textContent = "Round";
    this.#close.hidden = true;
    this.#body.replaceChildren(...this.#hint);
    this.#root.removeAttribute("data-open");
  }

  /** Move the keyboard focus into the panel. */
  focus() {
    this.#title.focus();
  }

  contains(node) {
    return this.#root.contains(node);
  }

  /** On narrow screens the panel covers the upper or the lower part of the page: the one without the word. */
  #stayClearOf(word) {
    const { top, bottom } = word.getBoundingClientRect();
    const isLow = (top + bottom) / 2 > window.innerHeight / 2;
    this.#root.setAttribute("data-side", isLow ? "top" : "bottom");
  }
}

function overview(columnTitle, round) {
  const numKept = round.tree?.accepted?.length ?? 0;
  const drafted = round.num_draft_tokens > 0
    ? `${counted(round.num_draft_tokens, "node")} drafted, ${numKept} accepted`
    : "nothing drafted";
  const company = round.num_sequences > 1 ? `, ${round.num_sequences} sequences in the forward` : "";
  return element("p", { class: "quiet" }, `${columnTitle}: ${drafted}${company}`);
}

function choicePart(token, round) {
  const origin = knownOrigin(token.origin);
  const value = token.node === null ? undefined : round.tree?.values?.[token.node];
  const facts = [];
  if (value !== undefined) facts.push(fact("the drafter’s value", percent(value)));
  if (Number.isFinite(token.log_prob)) {
    facts.push(fact("the target’s probability", percent(Math.exp(token.log_prob))));
    facts.push(fact("its log-probability", decimal(token.log_prob, 2)));
  }
  return element(
    "div",
    { class: "part" },
    element(
      "p",
      { class: "chosen" },
      element("span", { class: "sample", "data-origin": origin }, visibleText(token.text)),
      " ",
      element("span", { class: "quiet" }, ORIGINS[origin] ?? "origin unknown"),
    ),
    facts.length > 0 ? element("dl", { class: "facts" }, ...facts) : null,
  );
}

function fact(name, value) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value));
}

function alternativesPart(token) {
  if (!token.top?.length) return "";
  const choices = token.top.map((entry) => alternative(entry, token));
  return part("The target’s first choices here", element("ol", { class: "choices" }, ...choices));
}

function alternative(entry, token) {
  const probability = Math.exp(entry.log_prob);
  const isTaken = entry.text === token.text;
  return element(
    "li",
    { "data-chosen": isTaken ? "" : null },
    element("span", { class: "choice-text" }, visibleText(entry.text)),
    bar([["probability", probability]], 1),
    element("span", { class: "choice-value" }, percent(probability)),
    isTaken ? element("span", { class: "unseen" }, " written") : null,
  );
}

function writtenPart(token, round) {
  const words = round.tokens.map((written) =>
    gloss(
      element(
        "span",
        { class: "node-text", "data-origin": knownOrigin(written.origin) },
        readableText(written.text),
      ),
      Number.isFinite(written.log_prob) ? percent(Math.exp(written.log_prob)) : "",
      written === token,
    ),
  );
  return part("The round wrote, with the target’s probabilities", element("p", { class: "chain" }, ...words));
}

function treePart(token, round) {
  const list = treeList(round, token.node);
  return list ? part("Draft tree, with the drafter’s values", list) : "";
}

function timePart(round) {
  if (!round.seconds) return "";
  const times = PARTS_OF_TIME.map((name) => [name, round.seconds[name] ?? 0]);
  const total = times.reduce((sum, [, seconds]) => sum + seconds, 0);
  const rows = times.map(([name, seconds]) =>
    element(
      "div",
      {},
      element("dt", {}, element("span", { class: "swatch", "data-part": name }), name),
      element("dd", {}, milliseconds(seconds)),
    ),
  );
  return part(`Time, ${milliseconds(total)}`, bar(times, total), element("dl", { class: "times" }, ...rows));
}

function part(title, ...content) {
  return element("div", { class: "part" }, element("h3", {}, title), ...content);
}

/** A bar of parts; the numbers beside it say the same in text. */
function bar(values, total) {
  const drawing = shape("svg", {
    class: "bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false",
  });
  let x = 0;
  for (const [name, value] of values) {
    const width = total > 0 ? (100 * value) / total : 0;
    drawing.append(shape("rect", { x, y: 0, width, height: 1, "data-part": name }));
    x += width;
  }
  return drawing;
}
