/**
 * A draft tree as nested lists.
 *
 * Nodes that follow each other without a fork are one row, so that phrases read as phrases; the drafter's value
 * stands below each node. The accepted path comes first among its siblings, the target's own token at its end.
 */

import { element } from "./dom.js";
import { knownOrigin, percent, readableText } from "./wording.js";

/** The list of one round's tree; null where nothing was drafted. `chosen` is a node to be marked, or null. */
export function treeList(round, chosen) {
  const { tree } = round;
  if (!tree || tree.texts.length < 2) return null;
  const children = tree.texts.map(() => []);
  for (let node = 1; node < tree.texts.length; node += 1) children[tree.parents[node]].push(node);
  const accepted = new Set(tree.accepted);
  for (const siblings of children) {
    siblings.sort((a, b) => accepted.has(b) - accepted.has(a) || value(tree, b) - value(tree, a) || a - b);
  }
  const own = round.tokens.find((token) => token.node === null);
  const origins = new Map(round.tokens.map(({ node, origin }) => [node, knownOrigin(origin)]));
  const view = { tree, children, accepted, chosen, own, origins, end: tree.accepted.at(-1) ?? 0 };
  return branches(view, 0, "tree");
}

function value(tree, node) {
  return tree.values?.[node] ?? 0;
}

function branches(view, parent, className = null) {
  const rows = view.children[parent].map((node) => row(view, node));
  if (parent === view.end && view.own) rows.unshift(ownRow(view));
  return rows.length > 0 ? element("ul", { class: className }, ...rows) : null;
}

/** The target's own token, where the accepted path ends. */
function ownRow({ own, chosen }) {
  const token = gloss(nodeText(own.text, "target"), "target’s own", chosen === null);
  return element("li", {}, mark("→", "then"), element("span", { class: "chain" }, token));
}

function row(view, start) {
  const { tree, accepted, chosen, origins } = view;
  const isKept = accepted.has(start);
  const chain = unforkedChain(view, start);
  const nodes = chain.map((node) =>
    gloss(nodeText(tree.texts[node], origins.get(node)), percent(tree.values?.[node]), node === chosen),
  );
  return element(
    "li",
    { class: isKept ? "kept" : "rejected" },
    mark(isKept ? "✓" : "×", isKept ? "accepted" : "rejected"),
    element("span", { class: "chain" }, ...nodes),
    branches(view, chain.at(-1)),
  );
}

function nodeText(text, origin) {
  return element("span", { class: "node-text", "data-origin": origin }, readableText(text));
}

function unforkedChain({ children, accepted, end, own }, start) {
  const chain = [start];
  for (;;) {
    const last = chain.at(-1);
    const [next, ...others] = children[last];
    const isFork = next === undefined || others.length > 0 || (last === end && own);
    if (isFork || accepted.has(next) !== accepted.has(start)) return chain;
    chain.push(next);
  }
}

function mark(sign, word) {
  return element(
    "span",
    { class: "mark" },
    element("span", { "aria-hidden": "true" }, sign),
    element("span", { class: "unseen" }, `${word}: `),
  );
}

/** A text with a number below it, as in a gloss between lines. */
export function gloss(text, value, isChosen = false) {
  return element(
    "span",
    { class: "node", "data-chosen": isChosen ? "" : null },
    text,
    " ",
    element("span", { class: "node-value" }, value),
  );
}
