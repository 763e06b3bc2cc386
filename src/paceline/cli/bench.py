"""`paceline bench`: compare ways of decoding on the same prompts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.console import notice, notices, output
from paceline.config import AUTO_WIDTH, read_width
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.report import BenchmarkReport
    from paceline.bench.runner import Progress


def bench(
    out: Annotated[Path, Option(help="Folder for records, results.json, report.md and plots.")],
    suite: Annotated[str, Option(help="Suites, separated by commas; builtin needs no data.")] = "builtin",
    data: Annotated[Path | None, Option(help="Folder of NAME.jsonl files.")] = None,
    limit: Annotated[int | None, Option(help="Prompts per suite, evenly spaced over its file.")] = None,
    max_new_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 128,
    drafters: Annotated[str, Option(help="Separated by commas; phrase:FOLDER names a head.")] = (
        "none,prompt_lookup,phrase"
    ),
    verifiers: Annotated[
        str,
        Option(
            help="greedy, sampling, budgeted[:PRESET or :B/g/m/ACCRUAL/PRICE], typical[:EPSILON/DELTA], "
            "margin[:REGRET]; by commas."
        ),
    ] = "greedy",
    baseline: Annotated[
        str, Option(help="hf_generate, hf_generate_fp32, hf_generate_bf16, hf_prompt_lookup; may be empty.")
    ] = "hf_generate",
    peer: Annotated[
        str,
        Option(help="Rivals on the same prompts: llama.cpp, llama.cpp-q8_0, economize, economize-lookup."),
    ] = "",
    num_speculative_tokens: Annotated[
        str, Option(help="Most drafted nodes a round, or auto; several by commas.")
    ] = AUTO_WIDTH,
    batch_size: Annotated[str, Option(help="Prompts decoded at once; several by commas.")] = "1",
    target: Annotated[str, Option(help="Alias, folder, GGUF file or Hub id.")] = "smollm2",
    head: Annotated[Path | None, Option(help="Folder of a trained head; by default the shipped one.")] = None,
    dtype: Annotated[str, Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, Option(help="auto, cpu, cuda or mps.")] = "auto",
    execution: Annotated[str, Option(help="auto, fast or eager.")] = "auto",
    roofline: Annotated[
        bool, Option("--roofline", help="Hold forwards against the floor that memory sets.")
    ] = False,
    run_code: Annotated[
        bool,
        Option(
            "--run-code", help="Run programs that the model writes (humaneval), in a process of their own."
        ),
    ] = False,
    temperature: Annotated[float, Option(help="Of the sampling verifier.")] = 1.0,
    seed: Annotated[int, Option(help="Of sampling and of the intervals.")] = 0,
) -> None:
    """Measure drafters against each other and against Hugging Face generate().

    An interrupted run goes on when the same command is given again.
    """
    import paceline
    from paceline.bench.benchmark import BenchmarkOptions, run_benchmark

    options = BenchmarkOptions(
        suites=tuple(names(suite)),
        data_folder=data,
        limit=limit,
        max_new_tokens=max_new_tokens,
        drafters=tuple(names(drafters)),
        verifiers=tuple(names(verifiers)),
        baselines=tuple(names(baseline)),
        peers=tuple(names(peer)),
        widths=tuple(map(read_width, names(num_speculative_tokens))),
        batch_sizes=tuple(numbers("--batch-size", batch_size)),
        head=head,
        temperature=temperature,
        seed=seed,
        runs_code=run_code,
    )
    options.load_suites()
    generator = paceline.load(
        target,
        drafter="none",
        dtype=dtype,
        device=device,
        execution=execution,
        keep_model=True,
        progress=notice,
    )
    command = shlex.join(["paceline", *sys.argv[1:]])
    with progress_bar() as on_progress:
        report = run_benchmark(
            options,
            generator,
            target=target,
            out=out,
            command=command,
            with_roofline=roofline,
            on_progress=on_progress,
            notice=notice,
        )
    print_report(report, out)


def names(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [int(word) for word in names(text)]
    except ValueError:
        raise ConfigError(f"{option} is {text!r}: give whole numbers separated by commas") from None


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error with an estimate of the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=notices(), speed_estimate_period=600) as bar:
        task = bar.add_task("loading", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, total=progress.num_total, completed=progress.num_done, description=progress.text)

        yield show


def print_report(report: BenchmarkReport, out: Path) -> None:
    """The figures as tables on standard output."""
    from rich.table import Table

    from paceline.bench.lossy_report import lossy_lines
    from paceline.bench.report import TABLE_COLUMNS, table_cells

    console = output()
    for suite, batch_size in dict.fromkeys((row.suite, row.batch_size) for row in report.rows):
        table = Table(*TABLE_COLUMNS, title=f"{suite}, batch {batch_size}", title_justify="left")
        for row in report.rows:
            if (row.suite, row.batch_size) == (suite, batch_size):
                table.add_row(*table_cells(row))
        console.print(table)
    for line in [*lossy_lines(report.lossy), *report.peer_lines(), *report.roofline_lines()]:
        console.print(line)
    noise = report.rounding_noise
    num_near_ties = 0 if noise is None else sum(d.gap <= noise for d in report.differences)
    console.print(
        f"{len(report.differences)} answers differ from their reference, {num_near_ties} of them at ties "
        f"or near-ties that rounding explains; report: {out / 'report.md'}"
    )
