"""Computes the scales of keys, values or latents stored as int8: over all dims but the last."""

from meshwright.nn.quantisation import absmax_scale

STEPS = {"kv_scale": lambda context, step, values: absmax_scale(values, (values.ndim - 1,))}
