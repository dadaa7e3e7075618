"""Pictures and reports of what was measured on a machine."""
