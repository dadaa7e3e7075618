"""The command line: one file per verb, which reads options, calls the packages below and returns an answer."""
