"""Benchmarks: several ways of decoding on the same prompts, alternating, on one copy of the weights."""
