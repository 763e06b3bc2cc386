"""Output vocabularies: over which entries the last layer of a drafter scores."""
