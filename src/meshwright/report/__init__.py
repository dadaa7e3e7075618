"""Tables, text and pictures from plain data; nothing here computes what it shows."""
