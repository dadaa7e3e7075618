"""The front door for Python, which the verbs of the command line call: from names to plans, proofs and runs."""
