"""AdamW as optax has it: a transformation of all shards at once, elementwise, so that nothing communicates."""

import optax

STEPS = {"adamw": optax.scale_by_adam}
