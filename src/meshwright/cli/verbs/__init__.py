"""The verbs that plan, prove, run and measure: a module each."""

VERBS = {
    "Plan and prove": {
        "plan": ("Find how to split a training job over a cluster.",
            "plan llama3-8b --on h100:8x4 --batch 1Mi --seq 4096"),
        "service": ("Find how to serve a model on a cluster: engines, times, cost.",
            "service llama3-70b --on h100:8x4 --prompt 2048 --output 256 --tpot 20ms"),
        "explain": ("Say why a plan is as it is, in the book's notation.", "explain plan.toml"),
        "sweep": ("Plans over many sizes: scaling curves, heatmaps, memory, crossovers.",
            "sweep llama3-8b --on h100:8x1..8x64 batch=4Mi"),
        "limits": ("When communication hides behind compute: closed forms without a plan.",
            "limits llama3-70b --on v5p:16x20x28 --batch 4Mi --seq 4096"),
        "verify": ("Compile the real step of a plan for hardware that is not there.", "verify plan.toml"),
        "simulate": ("A fleet that trains while its parts fail: goodput, lost hours, days, cost.",
            "simulate fleet plan.toml --days 54 --rates llama3 --spares 2%"),
        "show": ("Models, chips and clusters: what is known of them.", "show llama3-8b"),
        "compare": ("Models side by side: sizes, memory, chips that hold them.", "compare llama3-8b gemma-7b"),
        "schedule": ("A pipeline schedule: its time, idle devices, memory, timeline.",
            "schedule 1f1b --stages 4 --microbatches 8"),
        "mask": ("An attention mask: its blocks, their predicted time, a measurement.",
            'mask "causal & document" --seq 8192 --on v5e'),
    },
    "Run": {
        "demo": ("Measure this machine, plan for it, train, compare.", "demo"),
        "train": ("Train a model by a plan, beside its prediction.", "train plan.toml"),
        "generate": ("Go on from prompts with a trained or published model.",
            "generate FOLDER --prompt 'Once upon a time'"),
        "serve": ("Serve a trained or published model over HTTP, with OpenAI's routes.", "serve FOLDER --port 8000"),
        "convert": ("Weights of a run or a model as a Hugging Face folder.", "convert runs/mine folder"),
        "launch": ("Run a verb in several processes on this machine.", "launch --processes 2 -- train plan.toml"),
        "compile": ("Compile what `serve` needs ahead of its start.", "compile FOLDER --on v5e:2x4"),
    },
    "Measure": {
        "bench": ("Measure the devices at hand, or a server on them: rates, latencies, a calibration.",
            "bench --on cpu:8 -o rates.toml"),
        "profile": ("Where the time of a step goes, beside its prediction.", "profile plan.toml"),
        "accuracy": ("Predictions beside published measurements.", "accuracy runs.jsonl --worst 5"),
        "hlo": ("A compiled program read: collectives, layouts, graph.", "hlo step.hlo --mesh fsdp=4,tensor=4"),
    },
}  # fmt: skip
"""Heading of `--help` -> verb -> (its line there, an example): read without importing a verb."""
