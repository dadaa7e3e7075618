"""Python API, which the verbs of the command line call: makes plans, proofs and runs from names."""
