"""One chip: its parts, its number formats, a systolic array."""
