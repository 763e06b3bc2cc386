"""`paceline train phrase` from prompts to a head folder, stage by stage.

    prompts -> answers -> vocabulary -> fit -> evaluation -> export

Every stage keeps what it made in the run folder and notes the options it depends on (`run_folder.py`). The same
command after an interruption goes on where it stopped; a changed option redoes the stages from the first one that
depends on it. Answers are special: they are kept per target and decoding options, whatever the list of prompts, so a
longer list or a higher number of tokens adds to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.training.distill import check_disk, predicted_bytes, read_answers, shard_paths
from paceline.training.options import STAGES, TrainingOptions
from paceline.training.progress import Reporter
from paceline.training.prompts import (
    TrainingPrompt,
    file_digest,
    read_exclusions,
    read_prompts,
    select_prompts,
)
from paceline.training.run_folder import RunFolder, stage_key, write_text
from paceline.training.synthesis import read_synthesised
from paceline.training.workers import Task, load_generator, run_workers

Figures = dict[str, Any]


class TrainingRun:
    """One run of the pipeline.

    Args:
        options: what to do.
        reporter: where progress is told.
        load: makes the `Generator`; tests pass their own.
    """

    def __init__(
        self,
        options: TrainingOptions,
        reporter: Reporter | None = None,
        load: Callable[[TrainingOptions], Any] = load_generator,
    ) -> None:
        self.options = options
        self.reporter = reporter or Reporter()
        self.folder = RunFolder(options.work_folder)
        self._load = load
        self._prompts: tuple[TrainingPrompt, ...] = ()

    @cached_property
    def generator(self) -> Any:
        """The loaded target."""
        return self._load(self.options)

    def run(self) -> dict[str, Figures]:
        """Run the stages up to `options.stop_after`.

        Returns:
            What each stage reported.
        """
        stages: dict[str, Callable[[str], Figures]] = {
            "prompts": self._run_prompts,
            "answers": self._run_answers,
        }
        key, reported = "", {}
        for stage in STAGES[: STAGES.index(self.options.stop_after) + 1]:
            if stage not in stages:
                break
            key = stage_key(key, self._dependencies(stage))
            figures = self.folder.figures(stage, key)
            if figures is None:
                figures = stages[stage](key)
                self.folder.finish(stage, key, figures)
            else:
                self.reporter.say(f"{stage}: done before")
            reported[stage] = figures
        return reported

    def _dependencies(self, stage: str) -> dict[str, Any]:
        """What the outcome of a stage depends on, beside the stage before it."""
        options = self.options
        if stage == "prompts":
            return {
                **options.chosen("data", "exclude", "max_per_source", "seed"),
                "digests": _digests((*options.data, *options.exclude)),
                "synthesised": self._synthesised_folder.name if options.num_synthesised else None,
                "num_synthesised": options.num_synthesised,
            }
        if stage == "answers":
            return {**options.chosen("num_tokens"), "answers": self.answers_folder.name}
        raise ConfigError(f"unknown stage {stage!r}")

    @cached_property
    def answers_folder(self) -> Path:
        """Shards of this target under these decoding options."""
        names = ("max_new_tokens", "temperature", "feature_layers")
        dependencies = {
            **self.options.chosen(*names),
            "seed": self.options.seed if self.options.temperature > 0 else None,
            "target": self.generator.target.fingerprint,
            "dtype": str(self.generator.target.dtype),
        }
        return self.folder.root / f"answers-{stage_key('', dependencies)[:8]}"

    @cached_property
    def _synthesised_folder(self) -> Path:
        """Prompts that this target wrote under these options."""
        dependencies = {
            **self.options.chosen("seed", "follow_ups"),
            "target": self.generator.target.fingerprint,
            "dtype": str(self.generator.target.dtype),
        }
        return self.folder.root / f"synthesised-{stage_key('', dependencies)[:8]}"

    @property
    def _prompts_file(self) -> Path:
        return self.folder.root / "prompts.jsonl"

    def prompts(self) -> tuple[TrainingPrompt, ...]:
        """The prompts that the first stage chose."""
        if not self._prompts:
            lines = self._prompts_file.read_text(encoding="utf-8").split("\n")
            self._prompts = tuple(TrainingPrompt.from_dict(json.loads(line)) for line in lines if line)
        return self._prompts

    def _run_prompts(self, key: str) -> Figures:
        """Read, synthesise, choose."""
        options = self.options
        found = list(read_prompts(options.data))
        if options.num_synthesised:
            found += self._synthesise()
        chosen = select_prompts(
            found,
            seed=options.seed,
            excluded=read_exclusions(options.exclude),
            max_per_source=options.max_per_source,
        )
        if not chosen.prompts:
            raise ConfigError("no prompts are left: give more --data, or --synthesise a number of them")
        rows = [json.dumps(prompt.as_dict(), ensure_ascii=False) for prompt in chosen.prompts]
        write_text(self._prompts_file, "\n".join(rows) + "\n")
        self._prompts = chosen.prompts
        by_source: dict[str, int] = {}
        for prompt in chosen.prompts:
            by_source[prompt.source] = by_source.get(prompt.source, 0) + 1
        self.reporter.say(
            f"prompts: {len(chosen.prompts):,} ({chosen.num_duplicates} duplicates and {chosen.num_excluded} "
            "excluded ones dropped)"
        )
        return {
            "num_prompts": len(chosen.prompts),
            "num_duplicates": chosen.num_duplicates,
            "num_excluded": chosen.num_excluded,
            "by_source": dict(sorted(by_source.items())),
        }

    def _synthesise(self) -> list[TrainingPrompt]:
        """Prompts written by the target, in the order of their numbers."""
        count = self.options.num_synthesised
        task = Task("synthesis", self.options, self._synthesised_folder, (), count)
        if sum(number < count for number in read_synthesised(task.folder)) < count:
            with self.reporter.bar("synthesising prompts", count, "prompts") as on_progress:
                run_workers(task, lambda: self.generator, on_progress)
        rows = read_synthesised(task.folder)
        return [prompt for number, prompt in sorted(rows.items()) if number < count and prompt is not None]

    def _run_answers(self, key: str) -> Figures:
        """Let the target answer."""
        options, folder = self.options, self.answers_folder
        target = self.generator.target
        num_bytes = predicted_bytes(options.num_tokens, target.hidden_size, len(options.feature_layers))
        self.reporter.say(
            f"answers: {options.num_tokens:,} tokens will take about {num_bytes / 1e9:.2f} GB of disk"
        )
        limit = None if options.max_disk_gb is None else int(options.max_disk_gb * 1e9)
        check_disk(folder, num_bytes, limit)
        task = Task("answers", options, folder, self.prompts(), options.num_tokens)
        with self.reporter.bar("answers", options.num_tokens, "tokens") as on_progress:
            run_workers(task, lambda: self.generator, on_progress)
        roots = {prompt.root_key for prompt in self.prompts()}
        num_answers = num_tokens = num_complete = 0
        by_source: dict[str, int] = {}
        for answer in read_answers(folder):
            if answer.root_key in roots:
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


def _digests(locations: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of every local file among the locations, by name."""
    found: dict[str, str] = {}
    for location in locations:
        path = Path(location)
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        found.update((str(file), file_digest(file)) for file in files if file.is_file())
    return found
