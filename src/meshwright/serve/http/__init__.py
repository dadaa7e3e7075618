"""The HTTP server: an engine behind OpenAI's API."""
