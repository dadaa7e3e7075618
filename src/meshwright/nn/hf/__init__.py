"""Reads and writes the weights of Hugging Face folders."""
