"""Chooses the next token of each request: sampling, grammar masks and drafts."""
