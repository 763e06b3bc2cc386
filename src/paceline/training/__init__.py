"""Training of draft heads: prompts, the target's own answers, captured states, fit, evaluation, provenance."""
