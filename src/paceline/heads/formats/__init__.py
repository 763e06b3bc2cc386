"""Public formats of draft heads: one importer or exporter a file."""
