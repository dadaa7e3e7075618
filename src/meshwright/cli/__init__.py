"""The command line: one file per verb, each a thin reader of the calls below it."""
