"""What a run leaves: metrics, goodput, results, its folder."""
