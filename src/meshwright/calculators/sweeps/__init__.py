"""Plans over many sizes."""
