"""The scale of each token and head of keys or values kept as int8."""

from meshwright.nn.quantisation import absmax_scale

STEPS = {"kv_scale": lambda context, step, values: absmax_scale(values, (values.ndim - 1,))}
