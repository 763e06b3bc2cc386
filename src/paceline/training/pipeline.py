"""A training run from prompts to a head folder, stage by stage.

Every kind of head has its own list of stages (`phrase_pipeline.py`, `eagle_pipeline.py`); all begin with
prompts and the target's answers, and end with evaluation and export.

Every stage keeps what it made in the run folder and notes the options it depends on (`run_folder.py`). The
same command after an interruption goes on where it stopped; a changed option redoes the stages from the
first one that depends on it. Answers are special: they are kept per target and decoding options, whatever
the list of prompts, so a longer list or a higher number of tokens adds to them.

Under `accelerate launch` all processes take part in the stages that can share their work; the others run in
the first one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from paceline.training import data_stages
from paceline.training.context import RunContext
from paceline.training.options import TrainingOptions
from paceline.training.progress import Reporter
from paceline.training.run_folder import stage_key
from paceline.training.workers import load_generator

Figures = dict[str, Any]
Reported = dict[str, Figures]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a pipeline.

    Attributes:
        name: as in `TrainingOptions.stages`.
        dependencies: options and inputs that its outcome depends on, beside the stage before it.
        run: does it, given what the stages before it reported.
        is_distributed: whether all processes take part.
    """

    name: str
    dependencies: Callable[[RunContext[Any]], dict[str, Any]]
    run: Callable[[RunContext[Any], Reported], Figures]
    is_distributed: bool = False


DATA_STAGES: tuple[Stage, ...] = (
    Stage("prompts", data_stages.prompt_dependencies, lambda context, _: data_stages.run_prompts(context)),
    Stage("answers", data_stages.answer_dependencies, lambda context, _: data_stages.run_answers(context)),
)
"""What every kind of head begins with."""


class TrainingRun:
    """One run of the pipeline.

    Args:
        options: what to do.
        stages: of this kind of head, in order.
        reporter: where progress is told.
        load: makes the `Generator`; tests pass their own.
    """

    def __init__(
        self,
        options: TrainingOptions,
        stages: Seq[Stage],
        reporter: Reporter | None = None,
        load: Callable[[TrainingOptions], Any] = load_generator,
    ) -> None:
        self.stages = tuple(stages)
        self.context = RunContext(options, reporter, load)
        self.processes = _Processes()

    def run(self) -> Reported:
        """Run the stages up to `options.stop_after`.

        Returns:
            What each stage reported.

        Raises:
            ConfigError: an option is wrong, or another process works in the same run folder.
        """
        if not self.processes.is_first:
            return self._run_stages()
        with self.context.folder.locked():
            return self._run_stages()

    def _run_stages(self) -> Reported:
        context = self.context
        key, reported = "", Reported()
        last = context.options.stages.index(context.options.stop_after)
        for stage in self.stages[: last + 1]:
            key = context.key = stage_key(key, stage.dependencies(context))
            if self.processes.is_first or stage.is_distributed:
                reported[stage.name] = self._run_stage(stage, key, reported)
            self.processes.wait()
            if stage.name not in reported:
                reported[stage.name] = context.folder.figures(self._record(stage), key) or {}
        return reported

    def _run_stage(self, stage: Stage, key: str, reported: Reported) -> Figures:
        """Run one stage, unless it was done before under the same key."""
        context = self.context
        figures = context.folder.figures(self._record(stage), key)
        if stage.name == "export" and not (context.options.out / "config.json").exists():
            figures = None
        if figures is not None:
            context.reporter.say(f"{stage.name}: done before")
            return figures
        figures = stage.run(context, reported)
        if self.processes.is_first:
            context.folder.finish(self._record(stage), key, figures)
        return figures

    def _record(self, stage: Stage) -> str:
        """Name under which a stage is noted: heads of several kinds may share prompts and answers."""
        return stage.name if stage in DATA_STAGES else f"{self.context.options.record_prefix}{stage.name}"


class _Processes:
    """The processes of `accelerate launch`; a plain run is its own first process."""

    def __init__(self) -> None:
        self._state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            self._state = PartialState()

    @property
    def is_first(self) -> bool:
        """Whether this process does what must be done once."""
        return self._state is None or bool(self._state.is_main_process)

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self._state is not None:
            self._state.wait_for_everyone()
