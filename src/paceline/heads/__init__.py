"""Draft heads: small networks that read the target's hidden states, and the folders they are kept in."""
