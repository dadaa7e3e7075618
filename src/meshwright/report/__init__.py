"""Tables and pictures. Every function takes plain data, so that any verb and the page can call it."""
