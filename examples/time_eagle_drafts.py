"""What the settings of an EAGLE drafter cost and bring: tokens a round, drafting time, tokens per second.

    python examples/time_eagle_drafts.py --target gemma3-270m --head HEAD --data DIR --limit 5

Every prompt is answered with every setting in turn, on the same loaded target; answers are compared. The
settings: output vocabulary, the share of likelihood below which a draft ends (`least_alive`), and how often a
speculated vocabulary chooses its candidates anew (`choosing_levels`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.threads import configure_threads

configure_threads()

import paceline
from paceline.bench.suites import load_suite
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.eagle_vocabularies import vocabulary_of
from paceline.engine.generator import Generator
from paceline.heads.formats.eagle_checkpoint import read_eagle

EVERY_LEVEL = 99


@dataclass(frozen=True)
class Setting:
    """One way to draft."""

    vocabulary: str
    least_alive: float
    choosing_levels: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        chosen = ""
        if self.vocabulary == "speculative":
            chosen = ", chosen at every level" if self.choosing_levels == EVERY_LEVEL else ", chosen once"
        return f"{self.vocabulary}{chosen}, least_alive {self.least_alive:g}"


@dataclass
class Sum:
    """Over the answers of one setting."""

    num_tokens: int = 0
    num_rounds: int = 0
    draft_seconds: float = 0.0
    seconds: float = 0.0


SETTINGS = [
    Setting(vocabulary, least_alive, levels)
    for least_alive in (0.0, 0.5)
    for vocabulary, levels in (("static", 1), ("speculative", EVERY_LEVEL), ("speculative", 1))
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME.jsonl of each suite")
    parser.add_argument("--suite", default="gsm8k,mt-bench,humaneval")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=16)
    given = parser.parse_args()
    plain = paceline.load(given.target, drafter="none", dtype="bf16")
    parameters = paceline.SamplingParameters(max_new_tokens=given.max_new_tokens)
    generators = {setting.name: drafting(plain, given.head, setting, given.nodes) for setting in SETTINGS}
    generators["none"] = plain
    for suite in given.suite.split(","):
        sums: dict[str, Sum] = defaultdict(Sum)
        for prompt in load_suite(suite, given.data, given.limit).prompts:
            answers = set()
            for name, generator in generators.items():
                result = generator.generate(prompt.turns[0], parameters)
                answers.add(result.token_ids)
                own, figures = sums[name], result.statistics
                own.num_tokens += figures.num_output_tokens
                own.num_rounds += figures.num_rounds
                own.draft_seconds += figures.draft_seconds
                own.seconds += figures.seconds
            assert len(answers) == 1, "settings change how fast an answer comes, not what it says"
        print(f"\n{suite}\n| setting | tokens a round | drafting, ms a round | tokens/s |\n|---|---|---|---|")
        for name, own in sums.items():
            drafting_ms = 1e3 * own.draft_seconds / own.num_rounds
            print(
                f"| {name} | {own.num_tokens / own.num_rounds:.3f} | {drafting_ms:.1f} | "
                f"{own.num_tokens / own.seconds:.1f} |"
            )


def drafting(plain: Generator, folder: Path, setting: Setting, num_nodes: int) -> Generator:
    """A generator on the same target that drafts as a setting says."""
    target = plain.target
    loaded = read_eagle(folder, num_layers=target.num_layers, vocab_size=target.vocab_size)
    layer = loaded.head.to(target.device, target.dtype).requires_grad_(False)
    drafter = EagleDrafter(
        target,
        layer,
        vocabulary_of(setting.vocabulary, target, loaded),
        least_alive=setting.least_alive,
        choosing_levels=setting.choosing_levels,
    )
    return Generator(
        target,
        plain.tokenizer,
        drafter,
        eos_token_ids=tuple(plain.eos_token_ids),
        num_speculative_tokens=num_nodes,
    )


if __name__ == "__main__":
    main()
