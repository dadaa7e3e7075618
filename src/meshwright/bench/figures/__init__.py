"""One kind of measurement a module."""
