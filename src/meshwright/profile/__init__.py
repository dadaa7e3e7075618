"""Profiles a real step: its time by part, kind of work and derived step, next to the prediction."""
