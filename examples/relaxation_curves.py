"""Decode under many limits of budgeted verification: what each of B, g, m and the price brings and costs.

    python examples/relaxation_curves.py --data FOLDER --out out/curves.json

One limit is changed at a time; a second table tells how much the text depends on the number of drafted nodes.
Tokens a round and log-probabilities do not depend on the clock, so the machine need not be quiet. Every row
is compared with strict decoding of the same prompts; brackets are paired 95 % intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.threads import configure_threads

configure_threads()  # Before torch is imported.

from paceline.bench.figures import figure
from paceline.bench.limit_trials import Trial, try_limits
from paceline.bench.suites import load_suite
from paceline.engine.generator import Generator
from paceline.relaxation import Relaxation
from paceline.sampling import SamplingParameters

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="smollm2")
parser.add_argument("--drafter", default="phrase")
parser.add_argument("--data", type=Path, help="Folder of NAME.jsonl files.")
parser.add_argument("--suites", default="gsm8k,math500,mt-bench,humaneval")
parser.add_argument("--limit", type=int, default=6, help="Prompts per suite.")
parser.add_argument("--max-new-tokens", type=int, default=256)
parser.add_argument("--nodes", type=int, default=48)
parser.add_argument("--other-nodes", default="16,32,64")
parser.add_argument("--out", type=Path, required=True)
arguments = parser.parse_args()

STABLE = Relaxation()
CURVES: dict[str, list[Relaxation]] = {
    "B": [replace(STABLE, risk_budget=value) for value in (1.0, 2.0, 4.0, 8.0, 16.0)],
    "g": [replace(STABLE, max_regret_per_value=value) for value in (0.05, 0.1, 0.25, 0.5, 1.0)],
    "m": [replace(STABLE, max_relaxed_tokens_per_block=value) for value in (1, 2, 4)],
    "price": [replace(STABLE, regret_price=value) for value in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)],
    "B at price 0": [replace(STABLE, regret_price=0.0, risk_budget=value) for value in (2.0, 4.0, 8.0)],
    "g at price 0": [
        replace(STABLE, regret_price=0.0, max_regret_per_value=value) for value in (0.05, 0.25, 0.5)
    ],
}


def loaded(num_nodes: int) -> Generator:
    """The target with trees of so many nodes."""
    import paceline

    return paceline.load(
        arguments.target,
        drafter=arguments.drafter,
        dtype="bf16",
        verifier="budgeted",
        num_speculative_tokens=num_nodes,
    )


def texts(generator: Generator, prompts: Seq[list[int]]) -> list[list[int]]:
    """Answers under the stable limits, as ids."""
    parameters = SamplingParameters(max_new_tokens=arguments.max_new_tokens, relaxation=STABLE)
    return [list(generator.generate(prompt, parameters).token_ids) for prompt in prompts]


def show(name: str, limits: Relaxation, trial: Trial) -> None:
    """One row of the table."""
    print(
        f"| {name} | {limits.risk_budget:g} | {limits.max_regret_per_value:g} | "
        f"{limits.max_relaxed_tokens_per_block} | {limits.regret_price:g} | {trial.accepted_per_round:.2f} | "
        f"{figure(trial.gain, 2)} | {trial.regret_per_token:.4f} | "
        f"{figure(trial.log_prob_change, 3, is_signed=True)} |",
        flush=True,
    )


def draw(document: dict[str, Any], path: Path) -> None:
    """Accepted tokens against the regret spent, a line for each limit that is changed.

    Not against the log-probability: on few prompts its noise is larger than the differences.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, curve in document["curves"].items():
        points = [trial for trial in curve if trial["gain"]]
        axes.plot(
            [trial["regret_per_token"] for trial in points],
            [trial["gain"]["value"] for trial in points],
            marker="o",
            label=name,
        )
    axes.set_xlabel("regret spent per token, logits")
    axes.set_ylabel("accepted tokens a round, times strict")
    axes.grid(alpha=0.4)
    axes.legend(title="changed")
    figure.savefig(path, dpi=110, bbox_inches="tight")


generator = loaded(arguments.nodes)
prompts = [
    generator.encode(prompt.turns[0])
    for suite in arguments.suites.split(",")
    for prompt in load_suite(suite, arguments.data, arguments.limit).prompts
]
wanted = list(dict.fromkeys(limits for curve in CURVES.values() for limits in curve))
trials = try_limits(generator, prompts, wanted, max_new_tokens=arguments.max_new_tokens)
by_limits = dict(zip(wanted, trials, strict=True))
print("| curve | B | g | m | price | accepted a round | x strict | regret a token | log-probability |")
print("|---|---|---|---|---|---|---|---|---|")
for name, curve in CURVES.items():
    for limits in curve:
        show(name, limits, by_limits[limits])
own = texts(generator, prompts)
rows = []
print("\n| nodes | x strict at as many nodes | log-probability | answers other than at the first |")
print("|---|---|---|---|")
for nodes in (arguments.nodes, *map(int, arguments.other_nodes.split(","))):
    other = generator if nodes == arguments.nodes else loaded(nodes)
    (trial,) = try_limits(other, prompts, [STABLE], max_new_tokens=arguments.max_new_tokens)
    changed = sum(a != b for a, b in zip(own, texts(other, prompts), strict=True)) / len(prompts)
    rows.append({"nodes": nodes, **trial.as_dict(), "share_of_other_answers": changed})
    print(
        f"| {nodes} | {figure(trial.gain, 2)} | {figure(trial.log_prob_change, 3, is_signed=True)} | "
        f"{changed:.0%} |",
        flush=True,
    )
arguments.out.parent.mkdir(parents=True, exist_ok=True)
document = {
    "num_prompts": len(prompts),
    "curves": {name: [by_limits[limits].as_dict() for limits in curve] for name, curve in CURVES.items()},
    "nodes": rows,
}
arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
draw(document, arguments.out.with_suffix(".png"))
