/** The form: what can be chosen, and the two requests that follow from it. */

import { byId, element } from "./dom.js";

const SETTINGS_STAY_OPEN = "(min-width: 40rem)";

export class Controls {
  #models = new Map();
  #form = byId("controls");
  #run = byId("run");
  #stop = byId("stop");

  /** `onRun` and `onStop` are called for the buttons and for Ctrl+Enter. */
  constructor(onRun, onStop) {
    byId("settings").open = window.matchMedia(SETTINGS_STAY_OPEN).matches;
    byId("model").addEventListener("change", () => this.#showModel());
    byId("verifier").addEventListener("change", () => this.#showBudget());
    this.#form.noValidate = true;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!isOff(this.#run)) onRun();
    });
    this.#stop.addEventListener("click", () => {
      if (!isOff(this.#stop)) onStop();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      if (!isOff(this.#run)) onRun();
    });
  }

  get hasModels() {
    return this.#models.size > 0;
  }

  /** Offer these models; the first is chosen. */
  offer(models) {
    this.#models = new Map(models.map((model) => [model.id, model.paceline ?? {}]));
    fill("model", [...this.#models.keys()].map((id) => [id, id]));
    this.#showModel();
  }

  /** While a run lasts it can be stopped but not started; both buttons keep the focus they may have. */
  setRunning(isRunning) {
    this.#run.setAttribute("aria-disabled", String(isRunning));
    this.#stop.setAttribute("aria-disabled", String(!isRunning));
  }

  /** Whether the form can be sent; the first wrong field says why not. */
  check() {
    if (!this.#form.checkValidity()) byId("settings").open = true;
    return this.#form.reportValidity();
  }

  get isConcurrent() {
    return byId("concurrent").checked;
  }

  /** The request of the plain column. */
  plainRequest() {
    return this.#request({ drafter: "none" });
  }

  /** The request of the speculative column. */
  speculativeRequest() {
    const nodes = byId("nodes").value.trim();
    const options = {
      drafter: byId("drafter").value,
      num_speculative_tokens: nodes === "auto" ? nodes : Number(nodes),
    };
    if (byId("verifier").value) options.verifier = byId("verifier").value;
    if (this.#hasBudget()) options.relaxation = relaxation();
    return this.#request(options);
  }

  #request(paceline) {
    const prompt = byId("prompt").value;
    const isChat = this.#model.has_chat_template !== false;
    const question = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    return {
      endpoint: isChat ? "chat/completions" : "completions",
      body: {
        model: byId("model").value,
        ...question,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number(byId("max-tokens").value),
        temperature: Number(byId("temperature").value),
        seed: Number(byId("seed").value),
        paceline: { ...paceline, trace: true },
      },
    };
  }

  get #model() {
    return this.#models.get(byId("model").value) ?? {};
  }

  #showModel() {
    const model = this.#model;
    const drafters = (model.drafters ?? []).filter((name) => name !== "none");
    fill("drafter", drafters.map((name) => [name, name]), model.default_drafter);
    const standard = model.default_verifier ? `default (${model.default_verifier})` : "default";
    fill("verifier", [["", standard], ...(model.verifiers ?? []).map((name) => [name, name])]);
    fill("preset", (model.presets ?? []).map((name) => [name, name]));
    byId("nodes").value = String(model.num_speculative_tokens ?? "auto");
    this.#showBudget();
  }

  #showBudget() {
    for (const field of this.#form.querySelectorAll('[data-for="budgeted"]')) {
      field.hidden = !this.#hasBudget();
      // A field that is out of sight must not hold up the form.
      field.querySelector("input, select").disabled = field.hidden;
    }
  }

  #hasBudget() {
    return (byId("verifier").value || this.#model.default_verifier) === "budgeted";
  }
}

function relaxation() {
  const limits = {};
  if (byId("preset").value) limits.preset = byId("preset").value;
  if (byId("risk-budget").value !== "") limits.risk_budget = Number(byId("risk-budget").value);
  return limits;
}

function fill(id, options, chosen = undefined) {
  const select = byId(id);
  select.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

function isOff(button) {
  return button.getAttribute("aria-disabled") === "true";
}
