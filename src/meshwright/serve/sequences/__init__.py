"""The running sequences of an engine: their cache pages, and their rows in a step."""
