"""Meshes of real or emulated devices, and the training and generation steps that run derived steps on them."""
