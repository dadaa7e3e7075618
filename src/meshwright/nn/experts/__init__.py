"""Routed experts: routing, slots, products."""
