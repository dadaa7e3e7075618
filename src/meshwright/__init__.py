"""meshwright: from a model and a cluster to a running, measured system."""

__version__ = "0.1.0"
