"""Pictures of arrays: who holds which block, how it is tiled."""
