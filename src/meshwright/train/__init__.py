"""Training runs: real text, the loop, what a run leaves behind, samples."""
