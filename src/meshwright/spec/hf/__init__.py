"""Hugging Face configs, read and written."""
