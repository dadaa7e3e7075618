"""One command a module, with what only that command prints."""
