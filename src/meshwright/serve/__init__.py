"""Text from a model: prompts in, tokens out, one strategy of one model at a time."""
