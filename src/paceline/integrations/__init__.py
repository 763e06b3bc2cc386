"""Adapters that let other libraries decode with paceline; each imports its library only when it is used."""
