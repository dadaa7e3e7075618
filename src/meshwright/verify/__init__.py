"""A step compiled for its target, and its HLO compared with the derived steps."""
