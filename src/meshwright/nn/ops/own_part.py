"""Returns the first part of a query, which is not rotated (latent attention in generation)."""

STEPS = {"own_part": lambda context, step, q: q[..., : context.model.qk_nope_head_dim]}
