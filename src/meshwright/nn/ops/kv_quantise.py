"""Quantises keys or values to int8, given their scales."""

from meshwright.nn.quantisation import quantise

STEPS = {"kv_quantise": lambda context, step, values, scale: quantise(values, scale, (values.ndim - 1,))}
