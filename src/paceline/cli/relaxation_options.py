"""Options of lossy verification: how far an answer may leave what the target itself would write."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.console import notice

if TYPE_CHECKING:
    from paceline.engine.generator import Generator
    from paceline.relaxation import Relaxation
    from paceline.sampling import SamplingParameters

PANEL = "Lossy verifiers"


@dataclass(frozen=True, slots=True)
class RelaxationOptions:
    """What is not given has the preset's value."""

    preset: Annotated[
        str | None, Option(help="budgeted: stable, discovery or normalised.", rich_help_panel=PANEL)
    ] = None
    risk_budget: Annotated[
        float | None,
        Option(help="budgeted: regret that a whole answer may spend, in logits.", rich_help_panel=PANEL),
    ] = None
    risk_budget_per_token: Annotated[
        float | None,
        Option(help="budgeted: what every emitted token adds to the budget.", rich_help_panel=PANEL),
    ] = None
    max_regret_per_value: Annotated[
        float | None,
        Option(help="budgeted: most regret of a token per token still at stake.", rich_help_panel=PANEL),
    ] = None
    max_relaxed_tokens_per_block: Annotated[
        int | None, Option(help="budgeted: most relaxed tokens a round.", rich_help_panel=PANEL)
    ] = None
    value_horizon: Annotated[
        int | None, Option(help="budgeted: depth up to which tokens are at stake.", rich_help_panel=PANEL)
    ] = None
    regret_price: Annotated[
        float | None,
        Option(
            help="budgeted: tokens that a logit of regret must bring; 0 takes the longest path.",
            rich_help_panel=PANEL,
        ),
    ] = None
    typical_epsilon: Annotated[
        float | None, Option(help="typical: probability that is always enough.", rich_help_panel=PANEL)
    ] = None
    typical_delta: Annotated[
        float | None, Option(help="typical: factor of exp(-entropy).", rich_help_panel=PANEL)
    ] = None
    max_regret: Annotated[
        float | None, Option(help="margin: most regret of a token, in logits.", rich_help_panel=PANEL)
    ] = None

    def relaxation(self) -> Relaxation:
        """The preset, changed by the options that were given; errors name what is out of range."""
        from paceline.relaxation import DEFAULT_RELAXATION, Relaxation

        chosen = DEFAULT_RELAXATION if self.preset is None else Relaxation.preset(self.preset)
        return chosen.updated(self._changes())

    def applied(self, parameters: SamplingParameters, generator: Generator) -> SamplingParameters:
        """The request with these limits; says so where the verifier does not look at them."""
        from paceline.registry import verifier_class

        given = [*self._changes(), *([] if self.preset is None else ["preset"])]
        if not given:
            return parameters
        name = generator.verifier or ("greedy" if parameters.is_greedy else "sampling")
        limits = getattr(verifier_class(name), "limits", ())
        # A preset is one of the budgeted verifier's, whatever else it holds.
        idle = [
            option for option in given if option not in (*limits, *(["preset"] * ("risk_budget" in limits)))
        ]
        if idle:
            notice(f"notice: {', '.join(idle)} changes nothing with verifier {name!r}")
        return replace(parameters, relaxation=self.relaxation())

    def _changes(self) -> dict[str, object]:
        """Options given by the user."""
        names = [field.name for field in fields(self) if field.name != "preset"]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
