"""AdamW of optax: one elementwise transformation of all shards, without communication."""

import optax

STEPS = {"adamw": optax.scale_by_adam}
