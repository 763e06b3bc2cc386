/**
 * Which part of the text each token wrote.
 *
 * The deltas are the text. Tokens lag behind or run ahead of it: a character may be spread over several tokens
 * ("\ufffd" in each), the end may be held back for a stop string or cut, a first blank may be dropped. So tokens
 * wait in a queue and each takes its share of the text; what fits nowhere goes to the token whose turn it is.
 */

const PARTIAL = "\ufffd";

export class TokenQueue {
  #waiting = [];

  /**
   * Share out one delta; its round's tokens join the queue first.
   *
   * Returns pieces `{text, token, round, continues}` whose texts, concatenated, are the delta. A piece that
   * continues belongs to the token of the piece before; token and round are null where the server sent none.
   */
  share(delta, round) {
    for (const token of round?.tokens ?? []) {
      this.#waiting.push({ token, round, rest: token.text, isBegun: false });
    }
    const pieces = [];
    let text = delta;
    while (text !== "") {
      const first = this.#waiting[0];
      if (!first) {
        pieces.push({ text, token: null, round: null, continues: false });
        break;
      }
      const length = this.#take(first, text);
      if (length > 0) {
        const { token, round: origin, isBegun } = first;
        pieces.push({ text: text.slice(0, length), token, round: origin, continues: isBegun });
        first.isBegun = true;
      }
      text = text.slice(length);
    }
    return pieces;
  }

  /** How much of `text` the first token takes; it leaves the queue unless more of it is to come. */
  #take(first, text) {
    if (first.rest.startsWith(text) && first.rest !== text) {
      first.rest = first.rest.slice(text.length);
      return text.length;
    }
    this.#waiting.shift();
    if (text.startsWith(first.rest)) return first.rest.length;
    const trimmed = first.rest.trimStart();
    if (!first.isBegun && text.startsWith(trimmed)) return trimmed.length;
    return this.#untilNext(text);
  }

  /** Length of the text before the next whole token in the queue; all of it where none follows. */
  #untilNext(text) {
    for (const [index, { rest }] of this.#waiting.entries()) {
      const at = rest === "" || rest.includes(PARTIAL) ? -1 : text.indexOf(rest);
      if (at >= 0) {
        this.#waiting.splice(0, index);
        return at;
      }
    }
    this.#waiting.length = 0;
    return text.length;
  }
}
