/**
 * Pointing at words: by mouse, touch and keyboard.
 *
 * Each answer is one stop of the Tab key; the arrow keys go from word to word. Hovering and focusing show the
 * word's round; a click or Enter holds it, so that the mouse can travel to the panel without changing it.
 */

import { RoundPanel } from "./panel.js";

export class WordPointer {
  #columns;
  #panel = new RoundPanel(() => this.#release());
  #word = null;
  #isHeld = false;

  constructor(columns) {
    this.#columns = columns;
    for (const column of columns) {
      const { answer } = column;
      answer.addEventListener("pointerover", (event) => {
        if (event.pointerType === "mouse" && !this.#isHeld) this.#point(column, event.target);
      });
      answer.addEventListener("focusin", (event) => this.#point(column, event.target));
      answer.addEventListener("click", (event) => this.#hold(column, event.target));
      answer.addEventListener("keydown", (event) => this.#press(column, event));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#panel.isOpen) this.#release();
    });
  }

  /** Forget everything, before a new run. */
  clear() {
    this.#isHeld = false;
    this.#mark(null);
    this.#panel.clear();
  }

  #point(column, word) {
    const piece = column.pieceOf(word);
    if (!piece || word === this.#word) return;
    this.#isHeld = false;
    this.#mark(word, column);
    this.#panel.show(column.title, piece, word);
  }

  #hold(column, word) {
    if (!column.pieceOf(word)) return;
    this.#point(column, word);
    word.focus();
    this.#isHeld = true;
    word.setAttribute("data-held", "");
  }

  /** Close the panel; who was inside it goes back to the word. */
  #release() {
    const word = this.#word;
    const wasInside = this.#panel.contains(document.activeElement);
    this.clear();
    if (wasInside && word?.isConnected) {
      word.focus();
      this.clear();
    }
  }

  /** Mark the word, and its round throughout the column. */
  #mark(word, column = null) {
    for (const { answer } of this.#columns) {
      for (const marked of answer.querySelectorAll("[data-marked], [data-held]")) {
        marked.removeAttribute("data-marked");
        marked.removeAttribute("data-held");
      }
    }
    this.#word = word;
    if (!word) return;
    for (const other of column.answer.querySelectorAll(`[data-round="${CSS.escape(word.dataset.round)}"]`)) {
      other.setAttribute("data-marked", other === word ? "word" : "round");
    }
    column.answer.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    word.setAttribute("tabindex", "0");
  }

  #press(column, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (!column.pieceOf(event.target)) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#word = null;
      this.#hold(column, event.target);
      this.#panel.focus();
      return;
    }
    const next = neighbour(column.words, event.target, event.key);
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }
}

function neighbour(words, word, key) {
  const index = words.indexOf(word);
  switch (key) {
    case "ArrowRight": return words[index + 1];
    case "ArrowLeft": return words[index - 1];
    case "Home": return words[0];
    case "End": return words.at(-1);
    case "ArrowDown": return onNextLine(words.slice(index + 1), word);
    case "ArrowUp": return onNextLine(words.slice(0, index).reverse(), word);
    default: return undefined;
  }
}

/** Of the nearest other line in the direction of `words`, the one whose place is closest to that of `word`. */
function onNextLine(words, word) {
  const from = word.getBoundingClientRect();
  let best;
  let line = null;
  for (const candidate of words) {
    const place = candidate.getClientRects()[0];
    if (!place || Math.abs(place.top - from.top) < place.height / 2) continue;
    if (line !== null && Math.abs(place.top - line) > place.height / 2) break;
    line = place.top;
    const distance = Math.abs(place.left - from.left);
    if (!best || distance < best.distance) best = { candidate, distance };
  }
  return best?.candidate;
}
