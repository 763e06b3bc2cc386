/** Numbers, origins and token texts in words that people read. */

export const ORIGINS = Object.freeze({
  phrase: "drafted phrase",
  token: "drafted token",
  relaxed: "relaxed token",
  target: "the target’s own",
});

/** An origin the page has a colour for; anything else is `unknown`. */
export function knownOrigin(origin) {
  return Object.hasOwn(ORIGINS, origin) ? origin : "unknown";
}

/** A number with a fixed count of decimals and a true minus sign; a dash where there is none. */
export function decimal(value, digits) {
  return Number.isFinite(value) ? value.toFixed(digits).replace("-", "−") : "–";
}

/** Three digits that count: 9.13, 91.3, 228. */
export function figure(value) {
  if (!Number.isFinite(value)) return "–";
  return decimal(value, value < 10 ? 2 : value < 100 ? 1 : 0);
}

/** A probability in percent; what rounds to 0 or 100 without being it says so. */
export function percent(probability) {
  if (!Number.isFinite(probability)) return "–";
  const value = 100 * probability;
  if (value > 0 && value < 0.1) return "<0.1%";
  if (value < 100 && value > 99.9) return ">99.9%";
  return `${decimal(value, value < 10 || (value > 99 && value < 100) ? 1 : 0)}%`;
}

/** Seconds as milliseconds. */
export function milliseconds(seconds) {
  return `${decimal(1000 * seconds, 1)} ms`;
}

/** A count with its noun: 1 token, 2 tokens. */
export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** Token text on one line, its blanks at the ends made visible. */
export function visibleText(text) {
  const shown = text.replace(/\r?\n/g, "↵").replace(/\t/g, "⇥");
  return shown.replace(/^ +| +$/g, (blanks) => "·".repeat(blanks.length)) || "(empty)";
}

/** Token text as it reads within a phrase: blanks only where nothing else is there. */
export function readableText(text) {
  return visibleText(text.replace(/^ +(?=\S)/, ""));
}

/** What a screen reader says for text without a letter to say; null where the text speaks for itself. */
export function spokenBlank(text) {
  if (text.trim() !== "") return null;
  return text.includes("\n") ? "line break" : "space";
}
