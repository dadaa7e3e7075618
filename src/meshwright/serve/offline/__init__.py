"""Prompts that are all there at the start: sequences side by side, or a file of them through an engine."""
