"""The part of a query that is not rotated."""

STEPS = {"unrotated_part": lambda context, step, q: q[..., : context.model.qk_nope_head_dim]}
