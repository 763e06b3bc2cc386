"""`paceline demo`: the same prompts with and without phrases, live, and what it brought."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from paceline.cli.console import notice, output
from paceline.config import AUTO_WIDTH
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine.generator import GenerationResult, Generator, StreamEvent

PROMPTS = (
    "A farmer has 23 hens and each hen lays 4 eggs a week. He sells the eggs in boxes of six for 2 dollars a "
    "box. How much does he earn in three weeks? Explain each step.",
    "What are the benefits of learning to play a musical instrument?",
    "Write a Python function that checks whether a word is a palindrome, and explain how it works.",
)
WARM_UP_TOKENS = 8
DRAFTED_STYLE = "black on bright_green"


@dataclass(frozen=True, slots=True)
class DemoPair:
    """One prompt answered twice.

    Attributes:
        plain: without drafting.
        drafted: with it.
    """

    plain: GenerationResult
    drafted: GenerationResult

    @property
    def is_identical(self) -> bool:
        """Whether both answers have the same ids."""
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def speed_up(self) -> float:
        """Tokens per second with drafting over those without."""
        return self.drafted.statistics.tokens_per_second / self.plain.statistics.tokens_per_second


def demo(
    target: Annotated[str, Option(help="Alias, folder, GGUF file or Hub id.")] = "smollm2",
    drafter: Annotated[str, Option(help="What drafts.")] = "phrase",
    head: Annotated[Path | None, Option(help="Folder of a trained head; by default the shipped one.")] = None,
    num_speculative_tokens: Annotated[
        str, Option(help="Most drafted tokens a round; auto: what pays here.")
    ] = AUTO_WIDTH,
    max_new_tokens: Annotated[int, Option(help="Most tokens of an answer.", min=1)] = 96,
    dtype: Annotated[str, Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    execution: Annotated[str, Option(help="auto, fast or eager.")] = "auto",
    prompt: Annotated[list[str] | None, Option(help="Your own prompt; may be repeated.")] = None,
) -> None:
    """Watch a model answer plainly and with phrases: the same text, sooner."""
    import paceline
    from paceline.bench.arms import engine_arms
    from paceline.config import dtype_name, read_width

    console = output()
    plain = paceline.load(
        target,
        drafter="none",
        dtype=dtype,
        execution=execution,
        keep_model=True,
        progress=notice,
    )
    [arm] = engine_arms(
        plain, [drafter], ["greedy"], [read_width(num_speculative_tokens)], head=head, progress=notice
    )
    drafted: Generator = arm.generator  # type: ignore[attr-defined]
    console.print(
        f"[bold]{target}[/bold] in {dtype_name(plain.target.dtype)}, greedy. Each prompt is answered twice: "
        f"one token a round, then with [bold]{drafter}[/bold] drafts that the model checks in one go."
    )
    if console.is_terminal:
        console.print(Text.assemble("Accepted drafts look ", ("like this", DRAFTED_STYLE), "."))
    for generator in (plain, drafted):
        generator.generate(PROMPTS[0], _greedy(WARM_UP_TOKENS))
    pairs = []
    for text in prompt or PROMPTS:
        console.print(f"\n[bold]> {text}[/bold]")
        answers = []
        for title, generator in (("plain", plain), (drafter, drafted)):
            console.rule(f"[dim]{title}[/dim]", align="left", style="dim")
            answers.append(stream_answer(console, generator, text, max_new_tokens))
        pairs.append(DemoPair(*answers))
    console.print()
    console.print(result_table(pairs))
    explain_differences(console, pairs, plain, prompt or PROMPTS)


def stream_answer(
    console: Console, generator: Generator, prompt: str, max_new_tokens: int
) -> GenerationResult:
    """Print one answer while it grows, accepted drafts coloured."""
    result = None
    for event in generator.stream(prompt, _greedy(max_new_tokens)):
        console.print(coloured(event, generator.tokenizer), end="")
        result = event.result
    if result is None:
        raise ConfigError("the answer ended without a result: the engine was stopped from outside")
    statistics = result.statistics
    console.print(f"\n[dim]{statistics.seconds:.1f} s, {statistics.tokens_per_second:.1f} tokens/s[/dim]")
    return result


def coloured(event: StreamEvent, tokenizer: Any) -> Text:
    """The event's text with accepted drafts marked, token by token where tokens can be told apart."""
    pieces = [tokenizer.decode([token_id], skip_special_tokens=True) for token_id in event.token_ids]
    if "".join(pieces) != event.text:
        # A character spans tokens, or text was held back: mark the whole of it.
        return Text(event.text, style=DRAFTED_STYLE if "drafted" in event.origins else "")
    return Text.assemble(
        *(
            (piece, DRAFTED_STYLE if origin == "drafted" else "")
            for piece, origin in zip(pieces, event.origins, strict=True)
        )
    )


def result_table(pairs: Seq[DemoPair]) -> Table:
    """Figures of all prompts, and of all together."""
    headings = ("prompt", "tokens", "plain", "drafted", "speed-up", "rounds", "a round", "same")
    table = Table(
        *headings, box=SIMPLE_HEAD, caption="plain, drafted: tokens per second; a round: tokens per forward"
    )
    for number, pair in enumerate(pairs, start=1):
        plain, drafted = pair.plain.statistics, pair.drafted.statistics
        table.add_row(
            str(number),
            str(drafted.num_output_tokens),
            f"{plain.tokens_per_second:.1f}/s",
            f"{drafted.tokens_per_second:.1f}/s",
            f"{pair.speed_up:.2f} x",
            f"{plain.num_rounds} -> {drafted.num_rounds}",
            f"{drafted.mean_acceptance_length:.2f}",
            "yes" if pair.is_identical else "no",
        )
    plain_seconds = sum(pair.plain.statistics.seconds for pair in pairs)
    drafted_seconds = sum(pair.drafted.statistics.seconds for pair in pairs)
    num_plain = sum(pair.plain.statistics.num_output_tokens for pair in pairs)
    num_drafted = sum(pair.drafted.statistics.num_output_tokens for pair in pairs)
    num_rounds = sum(pair.drafted.statistics.num_rounds for pair in pairs)
    table.add_section()
    table.add_row(
        "all",
        str(num_drafted),
        f"{num_plain / plain_seconds:.1f}/s",
        f"{num_drafted / drafted_seconds:.1f}/s",
        f"{num_drafted / drafted_seconds * plain_seconds / num_plain:.2f} x",
        f"{sum(pair.plain.statistics.num_rounds for pair in pairs)} -> {num_rounds}",
        f"{num_drafted / num_rounds:.2f}",
        f"{sum(pair.is_identical for pair in pairs)} of {len(pairs)}",
    )
    return table


def explain_differences(
    console: Console, pairs: Seq[DemoPair], generator: Generator, prompts: Seq[str]
) -> None:
    """Say of every differing answer whether rounding explains it."""
    from paceline.bench.near_ties import first_difference, logit_gaps, token_at, width_noise

    encoded = [generator.encode(prompt) for prompt in prompts]
    model: Any = generator.target.model  # type: ignore[attr-defined]
    for number, (pair, prompt_ids) in enumerate(zip(pairs, encoded, strict=True), start=1):
        plain, drafted = pair.plain.token_ids, pair.drafted.token_ids
        position = first_difference(drafted, plain)
        if position is None:
            continue
        chosen = [token_at(ids, position) for ids in (plain, drafted)]
        _, gap = logit_gaps(model, [*prompt_ids, *plain[:position]], *chosen)
        answers = [[*ids, *p.plain.token_ids] for ids, p in zip(encoded, pairs, strict=True)]
        console.print(
            f"Prompt {number}: the answers part at token {position + 1}, where the logits of the two tokens "
            f"lie {gap:.3f} apart. {_verdict(gap, width_noise(model, answers))}"
        )


def _verdict(gap: float, noise: float | None) -> str:
    """What a gap means on a model whose logits rounding moves by `noise`."""
    if noise is None:
        return "The answers are too short to tell what rounding does on this model: raise --max-new-tokens."
    if gap > noise:
        return f"Rounding explains {noise:.3f} on this model, which is less: please report this as a fault."
    return (
        f"Reading one token or many at once moves this model's logits by up to {noise:.3f}, so both texts "
        "are the model's own; with --dtype fp32 they are the same."
    )


def _greedy(max_new_tokens: int) -> Any:
    """Plain greedy decoding."""
    from paceline.sampling import SamplingParameters

    return SamplingParameters(max_new_tokens=max_new_tokens)
