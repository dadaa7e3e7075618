"""Predictions beside published measurements, and the fit to them."""
