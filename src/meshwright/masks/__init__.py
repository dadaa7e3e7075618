"""Attention masks and score rules, and the blocks of scores that a mask leaves to compute. They are written for the
array API, so that NumPy (planning) and JAX (execution) run the same functions."""
