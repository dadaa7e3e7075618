"""The unrotated first part of a query, for generation with latent attention."""

STEPS = {"unrotated_part": lambda context, step, q: q[..., : context.model.qk_nope_head_dim]}
