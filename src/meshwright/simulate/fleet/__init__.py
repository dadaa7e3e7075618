"""A fleet that trains while its parts fail: what is kept of its time under several policies, and what is lost."""
