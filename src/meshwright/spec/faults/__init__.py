"""Rates of faults in fleets: of published fleets, and of a user's files."""
