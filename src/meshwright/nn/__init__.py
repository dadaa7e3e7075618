"""Steps made real: the op kinds as pure JAX functions, the interpreter of derived steps, the weights."""
