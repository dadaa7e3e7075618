"""`plan --collective-matmul`: asked for, priced, written to the plan file, and said in words."""

from pathlib import Path

from meshwright.plan.plan_file import load_plan

PLAN = ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "1Mi", "--seq", "8Ki", "--axes", "tensor=8", "--top", "1")


def test_asked_for_and_explained(call):
    said = call(*PLAN, "--collective-matmul", "one-way", "-o", "plan.toml")
    assert (said.code, "one-way collective matmuls" in said.words) == (0, True)
    assert load_plan(Path("plan.toml")).strategy.collective_matmul == "one-way"
    told = call("explain", "plan.toml", "--all", "--notes").words
    assert "one-way collective matmuls, state" in told
    assert "h_passing[B_fsdp, T_tensor, D] = Permute_tensor(h[B_fsdp, T_tensor, D])" in told
    assert "can overlap with its products" in told
    assert "in blocks of T as they go round" in told


def test_a_plan_file_with_nonsense(call):
    assert call(*PLAN, "-o", "plan.toml").code == 0
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(text.replace('collective_matmul = "none"', 'collective_matmul = "sideways"'))
    said = call("explain", "plan.toml")
    assert (said.code, "strategy.collective_matmul is 'sideways'" in said.err) == (2, True)
