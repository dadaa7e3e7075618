"""Records of a run: metrics, goodput, results, and the run's folder."""
