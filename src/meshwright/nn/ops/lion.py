"""Lion of optax: one elementwise transformation of all shards, without communication."""

import optax

STEPS = {"lion": optax.scale_by_lion}
