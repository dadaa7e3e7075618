"""Reads and writes Hugging Face configs; reads GGUF metadata and quantisation settings of published folders."""
