"""Sharding notation, the sharded einsum, transformer programs and the derivation of their steps.

To read it, in this order: `notation` (arrays and the axes that split them), `steps` (the parts of a derivation),
`einsum` (the rules of a sharded product), `program` (a model as ops over named dims), `kinds` and `sizes` (what an op
declares, and the sizes from which it counts FLOPs and bytes), `tape` (where rules add steps), `ops.einsum`, `ops.add`,
`ops.copy` and `ops.rms_norm` (four ops), `ops` (how they are found), `derived` and `derive` (all of it put together).
The other ops of a dense Llama and its optimizer are `ops.embed`, `ops.rope`, `ops.attention`, `ops.silu_mul`,
`ops.linear_cross_entropy` and `ops.adamw`. Then, as wanted: `rewrites` of derived steps, ops of other families,
`transformer` and `generation` (models as programs), `schedules` of pipelines.
"""
