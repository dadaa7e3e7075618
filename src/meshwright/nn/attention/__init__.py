"""Attention on one device or round a ring, in the forms that platforms need."""
