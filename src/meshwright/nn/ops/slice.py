"""Returns this device's shard of an array that it has whole."""

from meshwright.nn.collectives import communicate

STEPS = {"slice": lambda context, step, value: communicate(step, value)}
