"""Optimizers, their schedules and their state."""
