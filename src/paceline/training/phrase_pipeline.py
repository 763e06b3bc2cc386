"""`paceline train phrase`: prompts -> answers -> vocabulary -> fit -> evaluation -> export."""

from __future__ import annotations

from paceline.training import phrase_stages
from paceline.training.pipeline import DATA_STAGES, Stage

PHRASE_PIPELINE: tuple[Stage, ...] = (
    *DATA_STAGES,
    Stage(
        "vocabulary",
        phrase_stages.vocabulary_dependencies,
        lambda context, _: phrase_stages.run_vocabulary(context),
    ),
    Stage("fit", phrase_stages.fit_dependencies, phrase_stages.run_fit, is_distributed=True),
    Stage("evaluation", phrase_stages.evaluation_dependencies, phrase_stages.run_evaluation),
    Stage("export", phrase_stages.export_dependencies, phrase_stages.run_export),
)
