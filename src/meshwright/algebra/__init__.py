"""Sharding notation, the sharded einsum, transformer programs and the derivation of their steps."""
