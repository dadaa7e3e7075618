"""Keeps a device's part of an array."""

from meshwright.nn.collectives import communicate

STEPS = {"slice": lambda context, step, value: communicate(step, value)}
