"""One executor for every pipeline schedule."""
