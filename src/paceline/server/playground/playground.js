/**
 * The playground: one prompt, decoded plainly and speculatively.
 *
 * Read here how a run goes; then column.js (an answer), tokens.js (which token wrote what), pointer.js and
 * panel.js (a word and its round), tree.js, controls.js, verdict.js, api.js and stream.js (the server).
 */

import { Client } from "./api.js";
import { Column } from "./column.js";
import { Controls } from "./controls.js";
import { byId, element } from "./dom.js";
import { WordPointer } from "./pointer.js";
import { hideVerdict, showVerdict } from "./verdict.js";
import { figure } from "./wording.js";

const client = new Client();
const plain = new Column("Plain", byId("plain"));
const speculative = new Column("Speculative", byId("speculative"));
const pointer = new WordPointer([plain, speculative]);
const controls = new Controls(run, stop);
let running = null;
let retry = loadModels;

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = byId("key").value;
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("prompt").focus();
  retry();
});

loadModels();

async function loadModels() {
  retry = loadModels;
  showError("");
  try {
    controls.offer(await client.models());
    say("Ready.");
  } catch (error) {
    report(error);
  }
}

async function run() {
  if (running || !controls.check()) return;
  if (!controls.hasModels) await loadModels();
  if (running || !controls.hasModels) return;
  retry = run;
  running = new AbortController();
  const { signal } = running;
  clear();
  controls.setRunning(true);
  const { isConcurrent } = controls;
  const requests = [[plain, controls.plainRequest()], [speculative, controls.speculativeRequest()]];
  try {
    if (isConcurrent) {
      say("Both are running.");
      await Promise.all(requests.map(([column, request]) => play(column, request, signal)));
    } else {
      for (const [column, request] of requests) {
        say(column === plain ? "Plain is running." : `${finished(plain)} Speculative is running.`);
        await play(column, request, signal);
      }
    }
    say("Both finished.", showVerdict(plain, speculative, isConcurrent));
  } catch (error) {
    running.abort();
    report(error);
  } finally {
    running = null;
    controls.setRunning(false);
  }
}

function stop() {
  running?.abort();
}

async function play(column, request, signal) {
  column.start();
  try {
    for await (const chunk of client.complete(request, signal)) column.add(chunk);
    column.finish();
  } catch (error) {
    column.breakOff(isAbort(error) ? "Stopped." : "Broken off.");
    throw error;
  }
}

function clear() {
  showError("");
  hideVerdict();
  pointer.clear();
  plain.clear();
  speculative.clear();
}

function finished(column) {
  return `${column.title} finished with ${figure(column.tokensPerSecond)} tokens/s.`;
}

function isAbort(error) {
  return error.name === "AbortError";
}

function report(error) {
  if (isAbort(error)) {
    say("Stopped.");
    return;
  }
  say("");
  showError(error.message);
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

/** Set the status line; `aside` is for those who do not see the comparison appear. */
function say(sentence, aside = "") {
  byId("status").replaceChildren(sentence, element("span", { class: "unseen" }, ` ${aside}`));
}

function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = message === "";
}
