"""Keys or values as int8 beside their scale."""

from meshwright.nn.quantisation import quantise

STEPS = {"kv_quantise": lambda context, step, values, scale: quantise(values, scale, (values.ndim - 1,))}
