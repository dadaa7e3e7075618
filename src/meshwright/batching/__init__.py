"""Schedules requests into steps of a server, and simulates queues of requests; the cost of a step is given.

Reading order: `request`, `limits`, `pages`, `scheduler`; then time: `clock`, `replica`, `simulation`; input and
output: `traffic`, `record`, `spans`.
"""
