"""An OpenAI-compatible HTTP server on the engine: `paceline serve`."""
