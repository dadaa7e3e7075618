"""A tour of meshwright in cells: run it whole, or cell by cell in an editor that knows `# %%`."""

# %% A question: Llama 3 70B, 4 Mi tokens a step, on 8,192 TPU v5p
import msgspec

import meshwright as mw

setting = mw.make_setting("llama3-70b", "v5p:16x16x32", batch="4Mi", seq_len=4096)

# %% The best strategies, fastest first
ranked = mw.rank_plans(setting, top=3)
for one in ranked.plans:
    axes = {axis: size for axis, size in one.strategy.mesh.items() if size > 1}
    print(f"{one.predicted.step_s:6.2f} s  MFU {one.predicted.mfu:.0%}  {axes}")

# %% Where the time of the best one goes
plan = ranked.plans[0]
for term in mw.explain(plan).terms[:3]:
    print(f"{term.share:5.0%}  {term.words}")

# %% The collectives of one layer, as they are derived, priced and executed
steps = mw.derive(plan.model, plan.strategy)
layer = next(block for block in steps.blocks if block.block.name == "layer")
for step in layer.forward:
    if step.is_collective:
        print(step)

# %% One change: is recomputing everything worth its memory?
full = mw.changed_plan(plan, strategy=msgspec.structs.replace(plan.strategy, remat="full"))
print(
    f"{full.predicted.step_s / plan.predicted.step_s:.2f} times the step, "
    f"{full.predicted.hbm_bytes_per_chip / plan.predicted.hbm_bytes_per_chip:.2f} times the memory"
)
