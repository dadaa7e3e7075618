"""The generation step on a mesh: rows of any sequences, with weights and cache pages on the devices."""
