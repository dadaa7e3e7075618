"""One sharded product or a chain of them: steps, times, execution on NumPy blocks."""
