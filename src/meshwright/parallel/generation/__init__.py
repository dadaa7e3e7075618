"""Steps of generation on a mesh: prompts and decode of one length, and the packed rows of a server."""
