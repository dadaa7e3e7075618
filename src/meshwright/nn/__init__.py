"""JAX side of the algebra: the ops as functions of one device's blocks, the interpreter of steps, the weights."""
