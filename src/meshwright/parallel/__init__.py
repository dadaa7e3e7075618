"""Meshes of real or emulated devices, and the training step built from derived steps."""
