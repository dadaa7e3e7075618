"""Calculators that answer the texts' exercises: nothing outside imports them."""
