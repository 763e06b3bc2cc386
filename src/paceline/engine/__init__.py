"""The engine: rounds of drafting and verification, and everything a request needs around them."""
