"""Which strategies can run, which is best, and why."""
