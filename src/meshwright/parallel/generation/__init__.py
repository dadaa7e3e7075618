"""The step of a server on a mesh: rows of any sequences, weights and pages on their devices."""
