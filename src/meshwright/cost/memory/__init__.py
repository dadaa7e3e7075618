"""Memory of one chip in a step: what it stores, what its passes keep, what compilers copy."""
