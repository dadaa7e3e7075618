"""Computes the int8 scales of keys, values or latents: one for each vector along the last dim."""

from meshwright.nn.quantisation import absmax_scale

STEPS = {"kv_scale": lambda context, step, values: absmax_scale(values, (values.ndim - 1,))}
