"""Simulates services under load, with the cost model as their scheduler's clock, and training fleets that fail."""
