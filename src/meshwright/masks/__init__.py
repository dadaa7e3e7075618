"""Masks and score rules of attention, and the blocks of scores that a mask leaves: functions on the array API, which
NumPy counts and JAX runs."""
