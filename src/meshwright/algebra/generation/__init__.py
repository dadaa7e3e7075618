"""Generation: its program, the cache that it reads and writes, and the steps derived from the program."""
