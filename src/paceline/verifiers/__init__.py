"""Verifiers: which drafted tokens are kept."""
