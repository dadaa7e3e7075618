"""A server measured beside a simulation of it whose clock is measured on the same devices."""
