"""`meshwright sweep`: one question over many sizes: clusters, models, batches, any field of a plan."""

import click

from meshwright.cli.group import VerbGroup, subverbs

SWEEPS = {
    "plans": (
        "The best plan as one or two fields change; the word may be left out.",
        "sweep llama3-8b --on h100:8x1..8x64 batch=4Mi --png scaling.png",
    ),
    "services": (
        "The best service as prompts, targets, clusters or other fields change.",
        "sweep services llama3-70b --on h100:8x1 prompt=1Ki..32Ki tpot=50ms",
    ),
    "batch": (
        "Communication against compute by batch size, and where they cross.",
        "sweep batch llama3-8b --on h100:8x8",
    ),
    "bandwidth": ("The bandwidth of every collective against chips.", "sweep bandwidth --on h100:8x64"),
    "streams": (
        "Compute and communication of a few layers side by side.",
        "sweep streams llama3-8b --on h100:8x8 --batch 64seq",
    ),
}


@click.group(cls=VerbGroup, verbs=subverbs("sweep", SWEEPS), otherwise="plans")
def command() -> None:
    """Ask one question over many sizes: a table, --json, --format csv, and a picture with --png FILE.

    \b
    meshwright sweep llama3-8b --on h100:8x1..8x64 batch=4Mi
    meshwright sweep 1B,7B,70B --on h100:8x1..8x64 batch=4Mi --figure tokens_per_s
    meshwright sweep llama3-8b --on h100:8x8 batch=1Mi remat tensor=1,2,4,8
    meshwright sweep llama3-8b --on h100:8x1 micro=1 seq_len --figure memory
    meshwright sweep llama3-70b --on h100:8x8 micro=1 fsdp=1 tensor=1,2,4,8 --figure memory
    meshwright sweep llama3-8b --on h100:8x8 micro=1 pipeline=1,2,4,8 num_microbatches=8,32
    meshwright sweep services llama3-70b --on h100:8x1 prompt=1Ki..32Ki tpot=50ms
    """
