"""Drafters: one algorithm a file, each proposing draft trees."""
