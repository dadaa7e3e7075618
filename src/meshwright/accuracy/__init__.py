"""Compares predictions with published measurements, and fits the efficiency numbers to these."""
