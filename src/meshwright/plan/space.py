"""The space of a search: patterns, each derived once with sizes as symbols, schedules, offloads, and fixed sizes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, get_args

import msgspec

from meshwright.algebra.derived import Derived
from meshwright.algebra.rewrites.remat import keeps_logits
from meshwright.algebra.rewrites.repeated_heads import repeated_dim, strategy_of_heads, with_repeated_heads
from meshwright.algebra.schedules.registry import searched_schedules
from meshwright.core.dims import EMULATED_AXES, ISLAND_AXES
from meshwright.cost.setting import Setting
from meshwright.plan.legal import DimSplit, size_rules, splits, zero_rules
from meshwright.plan.rules import LegalRule
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import (
    REPEATED_HEADS,
    RERUN_POLICIES,
    USUAL_POLICIES,
    ContextAttention,
    Rules,
    Strategy,
    make_mesh,
    standard_assignment,
)

Remat = str | tuple[str, ...]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a search tries for each choice other than the mesh, the placement and the microbatches.

    Rarely best values are tried last, with the two lightest remat policies, on the fastest meshes and their neighbours:
    ZeRO stages ``rare_zeros`` and, unless ``far_heads``, kv heads repeated over more devices than a domain has."""

    remats: tuple[Remat, ...] = USUAL_POLICIES
    zeros: tuple[int, ...] = (3, 1)
    rare_zeros: tuple[int, ...] = ()
    far_heads: bool = False
    sequence_parallel: tuple[bool, ...] = (True,)
    context_attention: tuple[str, ...] = ("ring", "ulysses")
    schedules: tuple[str, ...] = searched_schedules(every=False)
    offloads: tuple[tuple[str, ...], ...] = ((),)


USUAL = Choices(rare_zeros=(2,))
FULL = Choices(
    zeros=(3, 2, 1),
    far_heads=True,
    sequence_parallel=(True, False),
    context_attention=get_args(ContextAttention),
    schedules=searched_schedules(every=True),
    offloads=((), ("optimizer",), ("activations",), ("optimizer", "activations")),
)
EMULATED = Choices(
    remats=("none", "selective", "matmuls", "block", "full"),
    zeros=(3,),
    context_attention=("gather",),
    schedules=("1f1b",),
)
"""Choices for emulated devices, which share one memory and one processor: only values that make a difference there.
All other values run there if they are given."""


def axes_to_try(cluster: Cluster, fixed: Iterable[str]) -> tuple[str, ...]:
    """Returns the mesh axes that a search may use on a cluster, including the ``fixed`` ones."""
    if cluster.kind != "host":
        return ISLAND_AXES
    axis_names = {*EMULATED_AXES, *fixed}
    return tuple(axis for axis in ISLAND_AXES if axis in axis_names)


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """One assignment, remat policy and context attention, derived once for all meshes.

    ``rank`` is the index of the remat policy. A mesh needs several devices on one axis of each tuple in ``needs``: on
    other meshes the strategy equals an earlier pattern's. ``tensor_split`` restricts the pattern to meshes with (True)
    or without (False) several devices on ``tensor``, if the steps differ; else it is None. kv heads are repeated over
    the axes ``repeats``; such a pattern is for meshes whose devices on these axes do not divide the kv heads.
    """

    strategy: Strategy
    rank: int
    derived: Derived
    rules: tuple[LegalRule, ...]
    splits: tuple[DimSplit, ...]
    needs: tuple[tuple[str, ...], ...] = ()
    tensor_split: bool | None = None
    repeats: tuple[str, ...] = ()


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """All strategies that are searched, for jobs and clusters that differ from the setting's in size only.

    ``fixed`` are mesh axes whose size is given; ``num_microbatches`` and ``chunks`` are None if all numbers are tried.
    ``template`` has the fields that all strategies share; ``given`` names the fields that are not searched.
    """

    setting: Setting
    template: Strategy
    patterns: tuple[Pattern, ...]
    choices: Choices
    given: frozenset[str]
    schedules: tuple[str, ...]
    offloads: tuple[tuple[str, ...], ...]
    num_microbatches: int | None = None
    chunks: int | None = None
    fixed: dict[str, int] = {}
    axes: tuple[str, ...] = ISLAND_AXES

    def dims(self, batch_seqs: Any) -> dict[str, Any]:
        """Returns the sizes of all dims; B is the whole batch, in sequences."""
        return self.setting.model.dims | {"B": batch_seqs, "T": self.setting.job.seq_len}

    def with_reruns(self, remats: tuple[Remat, ...] = RERUN_POLICIES) -> "Space":
        """Returns the space with patterns of these remat policies appended; the space itself if remat is given, or on
        this machine, whose emulated devices share one memory."""
        is_fixed = "remat" in self.given or self.setting.cluster.kind == "host"
        return self if is_fixed else self._with(remats=remats)

    def with_rare(self) -> "Space":
        """Returns the space with the rarely best patterns of `Choices` appended; the space itself on this machine."""
        if self.setting.cluster.kind == "host":
            return self
        remats, zero_stages = self.choices.remats[:2], self.choices.rare_zeros
        space = self._with(far_heads=True, remats=remats)
        return space if "assignment" in self.given or not zero_stages else space._with(zeros=zero_stages, remats=remats)

    def _with(self, **choices: Any) -> "Space":
        merged = msgspec.structs.replace(self.choices, **choices)
        patterns = open_space(self.setting, self.template, given=self.given, choices=merged, fixed=self.fixed).patterns
        key_of = attrgetter("strategy", "tensor_split", "repeats")
        keys = [key_of(pattern) for pattern in self.patterns]
        return msgspec.structs.replace(self, patterns=(*self.patterns, *(p for p in patterns if key_of(p) not in keys)))


def open_space(
    setting: Setting,
    template: Strategy,
    *,
    given: Iterable[str] = (),
    choices: Choices = USUAL,
    fixed: Mapping[str, int] | None = None,
) -> Space:
    """Returns the space of strategies that differ from a template in the ``choices``, except the fields ``given``.

    Raises CannotRunError if the cluster is this machine's own devices and they do not run the template.
    """
    kept_names = set(given)
    fixed = dict(fixed or {})
    setting.require_runnable(msgspec.structs.replace(template, mesh=make_mesh(fixed)))
    choices = EMULATED if setting.cluster.kind == "host" else choices
    remats = (template.remat,) if "remat" in kept_names else choices.remats
    attention_modes = (template.context_attention,) if "context_attention" in kept_names else choices.context_attention
    assignments = [(template.assignment, ())] if "assignment" in kept_names else _assignments(choices)
    patterns = []
    for (assignment, needs), mode, (rank, remat) in itertools.product(assignments, attention_modes, enumerate(remats)):
        strategy = msgspec.structs.replace(template, assignment=assignment, context_attention=mode, remat=remat)
        needed_axes = needs if mode == attention_modes[0] else (*needs, ("context",))
        if any(all(fixed.get(axis) == 1 for axis in axes) for axes in needed_axes):
            continue
        patterns += [
            Pattern(
                strategy=strategy,
                rank=rank,
                derived=derived,
                rules=(*size_rules(derived), *(zero_rules(strategy, given=True) if "assignment" in kept_names else ())),
                splits=splits(derived),
                needs=needed_axes,
                tensor_split=tensor_split,
                repeats=axes,
            )
            for derived, tensor_split, axes in _forms(strategy, setting, fixed, far=choices.far_heads)
        ]
    return Space(
        setting=setting,
        template=template,
        patterns=tuple(patterns),
        choices=choices,
        given=frozenset(kept_names),
        schedules=(template.schedule,) if "schedule" in kept_names else choices.schedules,
        offloads=(template.offload,) if "offload" in kept_names else choices.offloads,
        num_microbatches=template.num_microbatches if "num_microbatches" in kept_names else None,
        chunks=template.chunks if "chunks" in kept_names else None,
        fixed=fixed,
        axes=axes_to_try(setting.cluster, fixed),
    )


def _forms(
    strategy: Strategy, setting: Setting, fixed: Mapping[str, int], *, far: bool
) -> Iterator[tuple[Derived, bool | None, tuple[str, ...]]]:
    """Yields the derived steps, ``tensor_split`` and ``repeats`` of each pattern of a strategy.

    Unless sizes are ``fixed``, a pattern with repeated kv heads is added if there are more devices than kv heads: chips
    of the cluster if ``far``, else of the fastest level of the network. The loss head has other steps if a device has
    the whole vocabulary, so that meshes with and without a split ``tensor`` get a pattern each."""
    model, cluster, head_axes = setting.model, setting.cluster, REPEATED_HEADS[repeated_dim(strategy)]
    reached_devices = cluster.domain if cluster.kind == "switched" and not far else cluster.num_chips
    variants: list[tuple[Strategy, tuple[str, ...]]] = [(strategy, ())]
    if all(axis in fixed for axis in head_axes):
        mesh = strategy.mesh | dict(fixed)
        variants = [(strategy_of_heads(msgspec.structs.replace(strategy, mesh=mesh), model.common_kv_heads), ())]
    elif model.common_kv_heads < min(model.num_heads, reached_devices):
        variants.append((with_repeated_heads(strategy), head_axes))
    for variant_strategy, repeated_axes in variants:
        derived = setting.symbolic(variant_strategy)
        if not setting.assumptions.traits.is_compiled or keeps_logits(strategy):
            yield derived, None, repeated_axes
            continue
        if fixed.get("tensor") != 1:
            yield derived, True, repeated_axes
        if fixed.get("tensor", 1) == 1 and repeated_axes != ("tensor",):
            yield setting.symbolic(variant_strategy, without=("tensor",)), False, repeated_axes


def _assignments(choices: Choices) -> list[tuple[dict[str, Rules], tuple[tuple[str, ...], ...]]]:
    """Returns every assignment with the ``needs`` of its pattern."""
    assignments = []
    for zero_stage, sequence_parallel in itertools.product(choices.zeros, choices.sequence_parallel):
        needs: tuple[tuple[str, ...], ...] = ()
        if zero_stage != choices.zeros[0]:
            needs += (("fsdp", "expert", "context"),)
        if sequence_parallel != choices.sequence_parallel[0]:
            needs += (("tensor",),)
        assignments.append((standard_assignment(zero=zero_stage, sequence_parallel=sequence_parallel), needs))
    return assignments
