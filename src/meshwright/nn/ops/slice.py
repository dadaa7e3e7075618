"""Returns this device's part of an array that it holds whole."""

from meshwright.nn.collectives import communicate

STEPS = {"slice": lambda context, step, value: communicate(step, value)}
