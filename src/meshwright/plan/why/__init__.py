"""Explains why a plan is the best one, and what other choices, chips or jobs would change."""
