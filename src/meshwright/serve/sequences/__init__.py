"""The sequences of an engine: their pages, and the rows of a step."""
