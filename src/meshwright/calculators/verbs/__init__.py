"""The verbs of the book's arithmetic: a module each."""

VERBS = {
    "The book's arithmetic": {
        "serving": ("What a slice serves: steps, batches, requests, cost: closed forms.",
            "serving llama2-70b --on v5e:4x4 --batch 32 --context 8192"),
        "roofline": ("What bounds one operation on one chip.",
            'roofline "bf16[B,D] * bf16[D,F] -> bf16[B,F]" --on v5e --dims B=512,D=4096,F=16384'),
        "shard": ("The steps of one sharded product, and what they cost.",
            'shard "x[B,D_Y] * w[D,F_Y] -> y[B,F_Y]" --mesh Y=4 --dims B=512,D=4096,F=16384 --on v5e:2x2'),
        "chain": ("The fastest shardings of a chain of products within a memory.",
            'chain "U[D,F] * x[B,D] -> h[B,F]" --mesh X=2,Y=2 --dims B=128,D=8192,F=32768 --on v5e:2x2'),
        "transfer": ("How long bytes take over one or several legs, or a collective.",
            "transfer 1GB --axis domain,nodes --on h100:8x256"),
        "budget": ("What a compute budget trains, and the days, energy and money it takes.",
            "budget 1e24 --on h100:8x128 --mfu 0.4"),
        "batch": ("Share a step out over replicas and microbatches.",
            "batch --batch 4Mi --seq 4096 --micro 2 --on h100:8x64"),
        "formats": ("Number formats: range, rounding, cost of a dot product.", "formats bf16 fp8 --value 0.1"),
        "systolic": ("A systolic array, cycle by cycle.", "systolic 8x8 --input 16"),
        "stream": ("Tiles of a product or of flash attention, from HBM to registers.",
            "stream matmul --seq 4096 --on v5e"),
    },
}  # fmt: skip
"""Heading of `--help` -> verb -> (its line there, an example): read without importing a verb."""
