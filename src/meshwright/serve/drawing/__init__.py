"""How the next token of a request is chosen: samples, constraints, drafts."""
