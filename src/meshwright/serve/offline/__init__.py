"""Generation without a server: a list or a file of prompts through an engine, or sequences in slots."""
