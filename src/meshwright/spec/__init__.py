"""Frozen plain data: models, chips, clusters, jobs, strategies, calibrations and predictions, read and checked."""
