"""Rivals: other programs that decode the same model, timed as arms on the same prompts in the same run.

Read `registry.py` first.
"""
