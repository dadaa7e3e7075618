"""Generation: its program, the cache that it reads and writes, and the steps that are derived of it."""
