"""Training of draft heads: prompts, the target's own answers, fit, evaluation, provenance."""
