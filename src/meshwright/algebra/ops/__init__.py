"""Rules of the op kinds: shardings, backward passes."""
