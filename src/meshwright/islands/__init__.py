"""Runtimes that train together without sharing one: who is there, and sums of arrays over TCP. Does not import JAX."""
