"""The calculators' commands."""
