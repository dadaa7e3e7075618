"""Where the time of a real step goes, beside its prediction."""
