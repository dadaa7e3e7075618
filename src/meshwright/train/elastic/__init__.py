"""Training in islands, each with a runtime of its own: one may leave and come back while the others go on."""
