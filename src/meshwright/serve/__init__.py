"""Serves one model with one strategy: prompts in, tokens out, over HTTP or offline."""
