"""Sharding notation, the sharded einsum, transformer programs and the derivation of their steps.

To read it, in this order: `notation` (arrays and the axes that split them), `einsum` (the rules of a sharded product),
`steps` (what a derivation is made of), `program` (a model as ops over named dims), `kinds` (what an op states of
itself), `ops.einsum`, `ops.add` and `ops.rms_norm` (three ops), `trace` (what rules work with), `derive` (all of it put
together). Then, as wanted: the other `ops`, `rewrites` of derived steps, `transformer` and `generation` (models as
programs), `schedules` of pipelines.
"""
