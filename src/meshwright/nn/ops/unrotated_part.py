"""The unrotated first part of a query, in latent attention that generates."""

STEPS = {"unrotated_part": lambda context, step, q: q[..., : context.model.qk_nope_head_dim]}
