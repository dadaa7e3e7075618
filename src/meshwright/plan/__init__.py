"""Finds the strategies that can run, ranks them, and explains why one is best."""
