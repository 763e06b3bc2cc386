"""The first two stages: prompts, and the target's answers."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import ConfigError
from paceline.training.context import RunContext, location_digests
from paceline.training.options import TrainingOptions
from paceline.training.prompts import TrainingPrompt, read_exclusions, read_prompts, select_prompts
from paceline.training.run_folder import write_text
from paceline.training.shards import check_disk, predicted_bytes, read_answers, shard_paths
from paceline.training.synthesis import read_synthesised
from paceline.training.workers import Task, run_workers


def prompt_dependencies(context: RunContext[TrainingOptions]) -> dict[str, Any]:
    """What the chosen prompts depend on."""
    options = context.options
    return {
        **options.chosen("data", "exclude", "max_per_source", "seed"),
        "digests": location_digests((*options.data, *options.exclude)),
        "synthesised": context.synthesised_folder.name if options.num_synthesised else None,
        "num_synthesised": options.num_synthesised,
    }


def run_prompts(context: RunContext[TrainingOptions]) -> dict[str, Any]:
    """Read, synthesise, choose; the prompts are written to `context.prompts_file`."""
    options = context.options
    found = list(read_prompts(options.data))
    if options.num_synthesised:
        found += _synthesise(context)
    chosen = select_prompts(
        found,
        seed=options.seed,
        excluded=read_exclusions(options.exclude),
        max_per_source=options.max_per_source,
    )
    if not chosen.prompts:
        raise ConfigError("no prompts are left: give more --data, or --synthesise a number of them")
    rows = [json.dumps(prompt.as_dict(), ensure_ascii=False) for prompt in chosen.prompts]
    write_text(context.prompts_file, "\n".join(rows) + "\n")
    by_source: dict[str, int] = {}
    for prompt in chosen.prompts:
        by_source[prompt.source] = by_source.get(prompt.source, 0) + 1
    context.reporter.say(
        f"prompts: {len(chosen.prompts):,} ({chosen.num_duplicates} duplicates and {chosen.num_excluded} "
        "excluded ones dropped)"
    )
    return {
        "num_prompts": len(chosen.prompts),
        "num_duplicates": chosen.num_duplicates,
        "num_excluded": chosen.num_excluded,
        "by_source": dict(sorted(by_source.items())),
    }


def _synthesise(context: RunContext[TrainingOptions]) -> list[TrainingPrompt]:
    """Prompts written by the target, in the order of their numbers."""
    count = context.options.num_synthesised
    task = Task("synthesis", context.options, context.synthesised_folder, (), count)
    if sum(number < count for number in read_synthesised(task.folder)) < count:
        with context.reporter.bar("synthesising prompts", count, "prompts") as on_progress:
            run_workers(task, lambda: context.generator, on_progress)
    rows = read_synthesised(task.folder)
    return [prompt for number, prompt in sorted(rows.items()) if number < count and prompt is not None]


def answer_dependencies(context: RunContext[TrainingOptions]) -> dict[str, Any]:
    """What the recorded answers depend on, beside the prompts."""
    return {**context.options.chosen("num_tokens"), "answers": context.answers_folder.name}


def run_answers(context: RunContext[TrainingOptions]) -> dict[str, Any]:
    """Let the target answer; the answers are written to `context.answers_folder`."""
    options, folder = context.options, context.answers_folder
    target = context.generator.target
    num_bytes = predicted_bytes(options.num_tokens, target.hidden_size, len(options.recorded_layers))
    context.reporter.say(
        f"answers: {options.num_tokens:,} tokens will take about {num_bytes / 1e9:.2f} GB of disk"
    )
    check_disk(folder, num_bytes, None if options.max_disk_gb is None else int(options.max_disk_gb * 1e9))
    task = Task("answers", options, folder, context.prompts, options.num_tokens)
    with context.reporter.bar("answers", options.num_tokens, "tokens") as on_progress:
        run_workers(task, lambda: context.generator, on_progress)
    num_answers = num_tokens = num_complete = 0
    by_source: dict[str, int] = {}
    for answer in read_answers(folder):
        if answer.root_key in context.root_keys:
            num_answers += 1
            num_tokens += len(answer.output_ids)
            num_complete += answer.is_complete
            by_source[answer.source] = by_source.get(answer.source, 0) + len(answer.output_ids)
    return {
        "num_answers": num_answers,
        "num_tokens": num_tokens,
        "num_complete": num_complete,
        "tokens_by_source": dict(sorted(by_source.items())),
        "num_bytes": sum(path.stat().st_size for path in shard_paths(folder)),
    }
