"""Which requests run in the next step of a server, and what a stream of requests waits for; not what a step costs.

Reading order: `request`, `limits`, `pages`, `scheduler`; then time: `clock`, `replica`, `simulation`; what comes in and
out: `traffic`, `record`, `spans`.
"""
