"""Soft-caps logits."""

from meshwright.nn.activations import capped

STEPS = {"softcap": lambda context, step, logits: capped(logits, context.model.logit_softcap)}
