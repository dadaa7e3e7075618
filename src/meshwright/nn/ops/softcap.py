"""Logits bounded by the model's cap."""

from meshwright.nn.activations import capped

STEPS = {"softcap": lambda context, step, logits: capped(logits, context.model.logit_softcap)}
