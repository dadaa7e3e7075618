"""Measures a server under load, and simulates it with step times that are measured on the same devices."""
