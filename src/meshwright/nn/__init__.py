"""JAX half of the algebra: ops as functions of one device's blocks, the interpreter of steps, the weights."""
