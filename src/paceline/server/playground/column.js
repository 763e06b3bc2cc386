/** One of the two answers: its text as words that can be pointed at, and its figures. */

import { element } from "./dom.js";
import { TokenQueue } from "./tokens.js";
import { ORIGINS, counted, decimal, figure, knownOrigin, spokenBlank } from "./wording.js";

export class Column {
  #figures = {};
  #note;
  #whole;
  #pieces = new Map();
  #queue = new TokenQueue();
  #startedAt = 0;
  #numRounds = 0;
  #finishReason = null;

  /** `title` names the column in sentences; `root` is its section. */
  constructor(title, root) {
    this.title = title;
    this.answer = root.querySelector(".answer");
    this.#note = root.querySelector(".note");
    this.#whole = root.querySelector(".whole");
    for (const node of root.querySelectorAll("[data-figure]")) this.#figures[node.dataset.figure] = node;
    this.clear();
  }

  /** Forget the last answer. */
  clear() {
    this.text = "";
    this.numTokens = 0;
    this.tokensPerSecond = NaN;
    this.usage = null;
    this.#numRounds = 0;
    this.#finishReason = null;
    this.#pieces.clear();
    this.#queue = new TokenQueue();
    this.answer.replaceChildren();
    this.#whole.hidden = true;
    this.#note.textContent = "";
    this.#show(NaN, NaN, NaN);
  }

  /** The clock starts with the request, as it does for whoever waits for the answer. */
  start() {
    this.clear();
    this.answer.setAttribute("aria-busy", "true");
    this.#startedAt = performance.now();
  }

  /** Take one chunk of the stream. */
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.#finishReason = choice.finish_reason ?? this.#finishReason;
    const round = chunk.paceline?.round ?? null;
    const delta = choice.delta?.content ?? choice.text ?? "";
    this.text += delta;
    if (round) {
      this.#numRounds += 1;
      this.numTokens += (round.tokens ?? []).length;
    }
    for (const piece of this.#queue.share(delta, round)) this.#append(piece);
    const seconds = (performance.now() - this.#startedAt) / 1000;
    const isCounted = this.#numRounds > 0;
    this.#show(isCounted ? this.numTokens / seconds : NaN, seconds, this.numTokens / this.#numRounds);
  }

  /** The stream is over: the server's own measurements replace the page's. */
  finish() {
    const measured = this.usage?.paceline ?? {};
    const seconds = measured.seconds ?? (performance.now() - this.#startedAt) / 1000;
    this.numTokens = this.usage?.completion_tokens ?? this.numTokens;
    this.tokensPerSecond = measured.tokens_per_second ?? this.numTokens / seconds;
    this.#numRounds = measured.num_rounds ?? this.#numRounds;
    this.#show(
      this.tokensPerSecond,
      seconds,
      measured.mean_acceptance_length ?? this.numTokens / this.#numRounds,
    );
    this.#close(this.#summary(measured));
  }

  /** The stream broke off; what was written stays. */
  breakOff(why) {
    this.#close(why);
  }

  /** What a word of the answer stands for: `{token, round}`, or undefined. */
  pieceOf(word) {
    return this.#pieces.get(word);
  }

  /** The words in reading order. */
  get words() {
    return [...this.#pieces.keys()];
  }

  #append({ text, token, round, continues }) {
    const last = this.answer.lastElementChild;
    if (continues && last) {
      last.append(text);
      const spoken = spokenBlank(last.textContent);
      if (spoken === null) last.removeAttribute("aria-label");
      else last.setAttribute("aria-label", spoken);
      return;
    }
    if (!token) {
      this.answer.append(element("span", { "data-origin": "unknown" }, text));
      return;
    }
    const origin = knownOrigin(token.origin);
    const blank = this.#goesOn(origin, round) ? "" : text.match(/^ *(?=\S)/)?.[0] ?? "";
    const word = element(
      "span",
      {
        role: "button",
        tabindex: this.#pieces.size === 0 ? "0" : "-1",
        "data-origin": origin,
        "data-round": round.round,
        "aria-label": spokenBlank(text),
        "aria-description": `${ORIGINS[origin] ?? "origin unknown"}, round ${round.round}`,
      },
      text.slice(blank.length),
    );
    this.#pieces.set(word, { token, round });
    this.answer.append(blank, word);
  }

  /** Whether a token goes on with the phrase before it, so that one line runs under both and their blank. */
  #goesOn(origin, round) {
    const last = this.answer.lastElementChild;
    return origin === "phrase" && last?.dataset.origin === origin && this.#pieces.get(last).round === round;
  }

  #summary(measured) {
    const parts = [`${counted(this.numTokens, "token")} in ${counted(this.#numRounds, "round")}`];
    if (measured.acceptance_rate > 0) {
      parts.push(`acceptance rate ${decimal(measured.acceptance_rate, 2)}`);
    }
    if (measured.num_relaxed_tokens > 0) {
      const spent = measured.regret_spent;
      const relaxed = `${measured.num_relaxed_tokens} relaxed`;
      parts.push(spent === undefined ? relaxed : `${relaxed}, regret ${decimal(spent, 2)}`);
    }
    if (this.#finishReason === "length") parts.push("ended by the limit of tokens");
    return parts.join(" · ");
  }

  #close(note) {
    this.answer.removeAttribute("aria-busy");
    this.#note.textContent = note;
    this.#whole.hidden = this.text === "";
    this.#whole.querySelector("p").textContent = this.text;
  }

  #show(speed, seconds, acceptance) {
    this.#figures.speed.textContent = figure(speed);
    this.#figures.seconds.textContent = decimal(seconds, 2);
    this.#figures.acceptance.textContent = decimal(acceptance, 2);
  }
}
