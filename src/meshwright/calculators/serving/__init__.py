"""A model replica that serves requests, in closed form: memory, step times, cost of requests."""
