"""Target models: where they come from and how they score draft trees."""
