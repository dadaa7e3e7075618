"""The text of a compiled program as data: its instructions, shapes, loops, collectives and products."""
