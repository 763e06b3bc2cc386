"""`paceline train eagle3`: prompts -> answers -> fit -> vocabulary -> evaluation -> export.

The static vocabulary comes behind the fit: heads that are trained with the whole output layer can be given
any subset afterwards, and another one leaves their weights as they are. A head that is trained *with* a
subset depends on it (`eagle_stages.fit_dependencies`).
"""

from __future__ import annotations

from paceline.training import eagle_stages
from paceline.training.pipeline import DATA_STAGES, Stage

EAGLE_PIPELINE: tuple[Stage, ...] = (
    *DATA_STAGES,
    Stage("fit", eagle_stages.fit_dependencies, eagle_stages.run_fit),
    Stage("vocabulary", eagle_stages.vocabulary_dependencies, eagle_stages.run_vocabulary),
    Stage("evaluation", eagle_stages.evaluation_dependencies, eagle_stages.run_evaluation),
    Stage("export", eagle_stages.export_dependencies, eagle_stages.run_export),
)
