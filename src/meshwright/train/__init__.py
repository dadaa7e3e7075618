"""Training runs: data, optimizers, the loop, checkpoints, and the folder that a run leaves."""
