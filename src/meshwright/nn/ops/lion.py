"""Lion as optax has it: a transformation of all shards at once, elementwise, so that nothing communicates."""

import optax

STEPS = {"lion": optax.scale_by_lion}
