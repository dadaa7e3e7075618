"""Text to token stores to batches."""
