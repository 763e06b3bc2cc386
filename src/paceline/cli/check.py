"""`paceline check`: is every difference from Hugging Face generate() a near-tie?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from paceline.cli.bench import names, progress_bar
from paceline.cli.console import notice
from paceline.config import AUTO_WIDTH, read_width


def check(
    target: Annotated[str, Option(help="Alias, folder, GGUF file or Hub id.")] = "smollm2",
    dtype: Annotated[str, Option(help="auto, fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[str, Option(help="auto, cpu, cuda or mps.")] = "auto",
    execution: Annotated[str, Option(help="auto, fast or eager.")] = "auto",
    suite: Annotated[str, Option(help="Suites, separated by commas.")] = "check",
    data: Annotated[Path | None, Option(help="Folder of NAME.jsonl files.")] = None,
    limit: Annotated[int, Option(help="Prompts per suite, evenly spaced over its file.")] = 100,
    max_new_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 128,
    drafters: Annotated[str, Option(help="Separated by commas.")] = "none,phrase",
    num_speculative_tokens: Annotated[str, Option(help="Most drafted nodes a round, or auto.")] = AUTO_WIDTH,
    head: Annotated[Path | None, Option(help="Folder of a trained head; by default the shipped one.")] = None,
    out: Annotated[Path | None, Option(help="Keep the answers here; the same command then goes on.")] = None,
) -> None:
    """Compare with Hugging Face generate(): differences that rounding does not explain make it fail."""
    import paceline
    from paceline.bench.benchmark import BenchmarkOptions
    from paceline.bench.check import run_check

    options = BenchmarkOptions(
        suites=tuple(names(suite)),
        data_folder=data,
        limit=limit,
        max_new_tokens=max_new_tokens,
        drafters=tuple(names(drafters)),
        widths=tuple(map(read_width, names(num_speculative_tokens))),
        head=head,
    )
    generator = paceline.load(
        target,
        drafter="none",
        dtype=dtype,
        device=device,
        execution=execution,
        keep_model=True,
        progress=notice,
    )
    with progress_bar() as on_progress:
        outcome = run_check(options, generator, target=target, out=out, on_progress=on_progress)
    print(f"threshold: {outcome.threshold:.4f} logits (noise of the reference between widths 1 and 64)")
    for d in outcome.differences:
        verdict = "near-tie" if d.gap <= outcome.threshold else "NOT A NEAR-TIE"
        print(f"{verdict}: {d.suite} {d.prompt_id}, {d.arm}, token {d.position}, gap {d.gap:.4f}")
    print(
        f"{outcome.num_answers} answers, {len(outcome.differences)} differ, "
        f"{len(outcome.violations)} by more than rounding"
    )
    if outcome.violations:
        raise typer.Exit(1)
