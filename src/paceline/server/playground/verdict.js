/** What the two answers say together: how much faster, and whether they are the same text. */

import { byId } from "./dom.js";
import { decimal, figure } from "./wording.js";

const NUM_SHOWN_CHARACTERS = 32;

/** Take the last comparison off the page. */
export function hideVerdict() {
  byId("verdict").hidden = true;
}

/** Compare two finished columns; returns the result in one sentence. */
export function showVerdict(plain, speculative, isConcurrent) {
  const ratio = speculative.tokensPerSecond / plain.tokensPerSecond;
  const isSame = plain.text === speculative.text;
  byId("ratio").textContent = decimal(ratio, 2);
  byId("speeds").textContent =
    `${figure(speculative.tokensPerSecond)} against ${figure(plain.tokensPerSecond)} tokens/s.`;
  byId("identity").textContent = isSame ? "Both texts are identical." : difference(plain, speculative);
  byId("identity").dataset.same = String(isSame);
  byId("caution").hidden = !isConcurrent;
  byId("caution").textContent = isConcurrent
    ? "Both ran at the same time and shared the machine: these are not the times of a lone request."
    : "";
  byId("verdict").hidden = false;
  return `Speculative was ${decimal(ratio, 2)} times as fast; ` +
    `the texts ${isSame ? "are identical" : "differ"}.`;
}

function difference(plain, speculative) {
  const first = [...plain.text];
  const second = [...speculative.text];
  let length = 0;
  while (length < first.length && first[length] === second[length]) length += 1;
  if (length === 0) return "The texts differ from the first character on.";
  if (length <= NUM_SHOWN_CHARACTERS) return after(first.slice(0, length).join(""));
  // Cut at a word where there is one.
  return after(`…${first.slice(length - NUM_SHOWN_CHARACTERS, length).join("").replace(/^\S*\s+(?=\S)/, "")}`);
}

function after(common) {
  return `The texts differ, first after “${common.replace(/\s+/g, " ")}”.`;
}
