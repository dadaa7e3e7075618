"""Writes the table of docs/models.md: ``python -m tests.parity_table docs/models.md``, in an hour or so on two cores.

``--only CASE ...`` runs these again and keeps the other rows.
"""

import argparse
from pathlib import Path

import tests.conftest  # noqa: F401  # eight emulated devices
from tests import parity

SHOWN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmo2", "smollm3", "glm4", "granite"),
    *("t5", "mt5", "umt5", "bart", "mbart", "marian", "whisper"),
    *("glm4_moe", "solar_open", "dots1", "exaone4", "exaone_moe", "hy_v3", "minimax_m2", "olmo3", "seed_oss"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "arcee", "ministral3", "mistral4"),
    *("starcoder2", "nemotron", "stablelm", "phi", "cohere", "cohere2", "gpt_neox", "falcon", "opt", "gpt_bigcode"),
    *("gptj", "gemma3n", "gemma4", "llama4"),
)
"""The case of each family that has a row."""

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
HEAD = ("family", "logits", "three steps", "weights back", "text", "refused")


def row(case: str) -> str:
    """The row of one case: the greatest differences over all meshes and shapes, and what is refused."""
    found: dict[str, parity.Outcome] = {}
    for shape in ("", *parity.shapes_of(case)):
        meshes = [parity.SHAPES[shape][1]] if shape else list(parity.BASE)
        theirs = parity.theirs_of_case(case, shape)
        found |= {shape or mesh: parity.run(case, mesh, shape, theirs=theirs) for mesh in meshes}
    ran = [one for one in found.values() if not one.refused]
    logits = max(one.logits for one in ran if one.logits is not None)
    steps = max(max(one.losses or 0.0, one.weights or 0.0) for one in ran)
    back, text = ([getattr(one, name) for one in ran] for name in ("is_written_back", "is_same_text"))
    counts = [f"{values.count(True)} of {len(values) - values.count(None)}" for values in (back, text)]
    refused = "; ".join(f"{name}" for name, one in found.items() if one.refused) or "none"
    return f"| {case} | {logits:.0e} | {steps:.0e} | {' | '.join(counts)} | {refused} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=())
    given = parser.parse_args()
    text = given.file.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    rows = {line.split("|")[1].strip(): line for line in inside.splitlines() if line.startswith("|")}
    rows = {name: line for name, line in rows.items() if name in SHOWN}
    for case in given.only or SHOWN:
        rows[case] = row(case)
        table = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}", *(rows[one] for one in SHOWN if one in rows)]
        given.file.write_text(f"{before}{BEGIN}\n" + "\n".join(table) + f"\n{END}{after}", encoding="utf-8")
        print(rows[case], flush=True)


if __name__ == "__main__":
    main()
