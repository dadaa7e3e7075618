"""Bytes over one or several links."""
