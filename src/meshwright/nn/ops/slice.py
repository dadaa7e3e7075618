"""The part of an array that a device keeps."""

from meshwright.nn.collectives import communicate

STEPS = {"slice": lambda context, step, value: communicate(step, value)}
