"""The verbs that plan, prove, run and measure: a module each."""

VERBS = {
    "plan": ("Plan and prove", "Find how to split a training job over a cluster."),
    "service": ("Plan and prove", "Find how to serve a model on a cluster: engines, times, cost."),
    "explain": ("Plan and prove", "Say why a plan is as it is, in the book's notation."),
    "sweep": ("Plan and prove", "Plans over many sizes: scaling curves, heatmaps, memory, crossovers."),
    "limits": ("Plan and prove", "When communication hides behind compute: closed forms without a plan."),
    "verify": ("Plan and prove", "Compile the real step of a plan for hardware that is not there."),
    "simulate": ("Plan and prove", "A fleet that trains while its parts fail: goodput, lost hours, days, cost."),
    "show": ("Plan and prove", "Models, chips and clusters: what is known of them."),
    "compare": ("Plan and prove", "Models side by side: sizes, memory, chips that hold them."),
    "schedule": ("Plan and prove", "A pipeline schedule: its time, idle devices, memory, timeline."),
    "mask": ("Plan and prove", "An attention mask: its blocks, their predicted time, a measurement."),
    "demo": ("Run", "Measure this machine, plan for it, train, compare."),
    "train": ("Run", "Train a model by a plan, beside its prediction."),
    "generate": ("Run", "Go on from prompts with a trained or published model."),
    "serve": ("Run", "Serve a trained or published model over HTTP, with OpenAI's routes."),
    "convert": ("Run", "Weights of a run or a model as a Hugging Face folder."),
    "launch": ("Run", "Run a verb in several processes on this machine."),
    "compile": ("Run", "Compile what `serve` needs ahead of its start."),
    "bench": ("Measure", "Measure the devices at hand, or a server on them: rates, latencies, a calibration."),
    "profile": ("Measure", "Where the time of a step goes, beside its prediction."),
    "accuracy": ("Measure", "Predictions beside published measurements."),
    "hlo": ("Measure", "A compiled program read: collectives, layouts, graph."),
}
"""Verb -> (its heading in `--help`, its line there): read without importing a verb."""
