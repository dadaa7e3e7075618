"""The verbs of the book's arithmetic: a module each."""

VERBS = {
    "serving": ("The book's arithmetic", "What a slice serves: steps, batches, requests, cost: closed forms."),
    "roofline": ("The book's arithmetic", "What bounds one operation on one chip."),
    "shard": ("The book's arithmetic", "The steps of one sharded product, and what they cost."),
    "chain": ("The book's arithmetic", "The fastest shardings of a chain of products within a memory."),
    "transfer": ("The book's arithmetic", "How long bytes take over one or several legs, or a collective."),
    "budget": ("The book's arithmetic", "What a compute budget trains, and the days, energy and money it takes."),
    "batch": ("The book's arithmetic", "Share a step out over replicas and microbatches."),
    "formats": ("The book's arithmetic", "Number formats: range, rounding, cost of a dot product."),
    "systolic": ("The book's arithmetic", "A systolic array, cycle by cycle."),
    "stream": ("The book's arithmetic", "Tiles of a product or of flash attention, from HBM to registers."),
}
"""Verb -> (its heading in `--help`, its line there): read without importing a verb."""
