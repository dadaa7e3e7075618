"""Derived steps that generate, and the strategies that they run under."""

from msgspec.structs import replace

from meshwright.algebra.derive import derive, forward_pass
from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation.program import AS_WRITTEN, Storage
from meshwright.algebra.generation.stored import encoding_program, generation_program
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.program import Op, Program
from meshwright.algebra.rewrites.collective_matmul import in_blocks
from meshwright.algebra.rewrites.pipeline import boundary
from meshwright.algebra.rewrites.repeated_heads import repeating, strategy_of_heads
from meshwright.algebra.rewrites.torus import blocks_leg_by_leg
from meshwright.algebra.tape import Shardings
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import CannotRunError
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import GENERATION_RULES, Rules, Strategy
from meshwright.spec.weights import without_mtp


def derive_forward(program: Program, strategy: Strategy, axes: tuple[str, ...] | None = None) -> Derived:
    """Derives the forward steps of a program that is never differentiated: no backward pass, no update, nothing kept.
    The steps have the mesh ``axes`` whatever their sizes; by default the axes of several devices."""
    program = _with_wide_norms(repeating(program, strategy), strategy)
    shardings = Shardings(program, strategy, strategy.active_axes if axes is None else axes)
    blocks = [BlockSteps(block, tuple(forward_pass(block, shardings).steps), (), ()) for block in program.blocks]
    declared = {name: shardings.declared(name) for name in program.variables}
    return Derived(
        program,
        blocks_leg_by_leg((in_blocks(block, shardings) for block in blocks), strategy),
        (),
        declared,
        boundary=tuple(step for step in boundary(program, shardings) if step.phase == "forward"),
    )


def _with_wide_norms(program: Program, strategy: Strategy) -> Program:
    """Returns the program; if the strategy splits D of the stream, with RMS norms that sum over devices."""
    if not strategy.rules("activation").get("D"):
        return program

    def wide(op: Op) -> Op:
        return replace(op, kind="wide_rms_norm") if op.kind == "rms_norm" else op

    return replace(program, blocks=tuple(replace(b, ops=tuple(map(wide, b.ops))) for b in program.blocks))


# -- the step of a job ----------------------------------------------------------------------------------


def derive_job(
    model: Model,
    job: Job,
    strategy: Strategy,
    *,
    storage: Storage = AS_WRITTEN,
    options: ProgramOptions = PLAIN,
    fused_head: bool = True,
) -> Derived:
    """Returns the derived step of a job: both passes and the update of a training job, else the step of a server."""
    strategy = strategy_of_heads(job_strategy(job, strategy), model.common_kv_heads)
    if job.trains:
        return derive(transformer(model, options), strategy, optimizer=job.optimizer, fused_head=fused_head)
    return derive_phase(model, strategy, storage, prompts=job.has_prompts)


def derive_generation(
    model: Model,
    strategy: Strategy,
    storage: Storage = AS_WRITTEN,
    axes: tuple[str, ...] | None = None,
    *,
    prompts: bool = False,
) -> Derived:
    """Returns the step of a server, with the mesh ``axes`` whatever their sizes (default: axes of several devices).
    Heads are repeated if the strategy says so. A step has ``prompts`` if its sequences have several rows."""
    # if positions of a cache are split, each device attends with all heads to its positions
    is_joined = prompts and not strategy.rules("cache").get("S")
    program = generation_program(without_mtp(model), storage, joined=is_joined)
    return derive_forward(program, packed_rows(strategy, prompts=prompts), axes)


def derive_encoding(
    model: Model, strategy: Strategy, storage: Storage = AS_WRITTEN, axes: tuple[str, ...] | None = None
) -> Derived:
    """Returns the steps that encode sources (inputs of the encoder) for an engine with `derive_generation`'s step."""
    return derive_forward(encoding_program(model, storage), packed_sources(strategy), axes)


def derive_phase(
    model: Model,
    strategy: Strategy,
    storage: Storage = AS_WRITTEN,
    axes: tuple[str, ...] | None = None,
    *,
    prompts: bool = False,
) -> Derived:
    """Returns the server step of `derive_generation` for counting. With an encoder a step with ``prompts`` also encodes
    as many sources as it has rows, each with its first row; other steps list encoder blocks as ``beside``."""
    if not model.encoder:
        return derive_generation(model, strategy, storage, axes, prompts=prompts)
    encoder, decoder = encoding_program(model, storage), generation_program(model, storage)
    variables = encoder.variables | decoder.variables
    if not prompts:
        derived = derive_forward(Program(decoder.blocks, variables, decoder.stacks), packed_rows(strategy), axes)
        return replace(derived, beside=encoder.blocks)
    program = Program((*encoder.blocks, *decoder.blocks), variables, (*encoder.stacks, *decoder.stacks))
    return derive_forward(program, packed_sources(strategy), axes)


def derive_sources(model: Model, strategy: Strategy, storage: Storage = AS_WRITTEN) -> Derived:
    """Returns the steps of `derive_encoding` for counting, with the decoder's blocks as ``Derived.beside``."""
    encoder, decoder = encoding_program(model, storage), generation_program(model, storage)
    program = Program(encoder.blocks, encoder.variables | decoder.variables, encoder.stacks)
    return replace(derive_forward(program, packed_sources(strategy)), beside=decoder.blocks)


def job_strategy(job: Job, strategy: Strategy) -> Strategy:
    """Returns the strategy of a training job; for other jobs its `generation_strategy`."""
    return strategy if job.trains else generation_strategy(strategy, prompts=job.has_prompts)


def generation_strategy(strategy: Strategy, *, prompts: bool = False) -> Strategy:
    """Returns the strategy as a step that generates runs it.

    It has no offload, no bound on the slots of experts, and one microbatch (pipelined prompts, which are priced but not
    executed, keep their number). Keys are gathered over ``context`` also where training uses a ring or ulysses. Raises
    CannotRunError for pipeline stages without prompts.
    """
    stages = strategy.mesh.get("pipeline", 1)
    if stages > 1 and not prompts:
        raise CannotRunError(
            f"pipeline={stages} trains but does not generate in this version. Use its devices as tensor, data or fsdp."
        )
    microbatches = strategy.num_microbatches if stages > 1 else 1
    return replace(strategy, context_attention="gather", num_microbatches=microbatches, offload=(), capacity_factor=0.0)


def packed_sources(strategy: Strategy) -> Strategy:
    """Returns the strategy for encoding sources: axes that split neither sequences nor heads split their positions."""
    packed_strategy = packed_rows(strategy)
    assignment = dict(packed_strategy.assignment)
    for role in ("activation", "input"):
        rules = assignment[role]
        axes = (a for a in strategy.rules(role).get("T", ()) if a != "tensor" and a not in rules["B"])
        assignment[role] = {**rules, "S": tuple(axes)}
    return replace(packed_strategy, assignment=assignment)


def packed_rows(strategy: Strategy, *, prompts: bool = False) -> Strategy:
    """Returns the strategy for packed rows.

    The axes that split sequences of caches assign each sequence to a group of devices, which has its rows, its pages
    and its rows with logits. Axes that split positions of caches split the slots of every page. In steps with
    ``prompts``, which have many rows, the axes that split positions of prompts also split rows.
    """
    rules_by_role = GENERATION_RULES | strategy.assignment
    owner_axes, output_axes = rules_by_role["cache"].get("B", ()), rules_by_role["output"].get("B", ())
    axes_by_role = {role: rules_by_role[role].get("B", ()) for role in ("activation", "input", "position")}
    changed_rules: dict[str, Rules] = {
        "position": {"B": axes_by_role["position"], "Q": owner_axes, "O": output_axes},
        "output": {"O": output_axes},
        "cache": {
            **{dim: axes for dim, axes in rules_by_role["cache"].items() if dim not in ("B", "S")},
            "Pg": owner_axes,
            "Pw": owner_axes,
            "Pl": rules_by_role["cache"].get("S", ()),
        },
    }
    for role in ("activation", "input"):
        row_axes = (*axes_by_role[role], *(rules_by_role[role].get("T", ()) if prompts else ()))
        changed_rules[role] = {**rules_by_role[role], "B": tuple(dict.fromkeys(row_axes)), "O": axes_by_role[role]}
    assignment = rules_by_role | changed_rules
    for role, rules in assignment.items():  # a row is one position, whose slots of experts are split as rows are
        packed_rules = {dim: axes for dim, axes in rules.items() if dim != "T"}
        if "C" in packed_rules and "B" in packed_rules:
            packed_rules["C"] = tuple(axis for axis in packed_rules["C"] if axis in packed_rules["B"])
        assignment[role] = packed_rules
    return replace(strategy, assignment=assignment)
