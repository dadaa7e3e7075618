"""Routed experts: the router, its losses, slots of experts and their products."""
