"""Links, placement of mesh axes on them, and seconds of collectives."""
