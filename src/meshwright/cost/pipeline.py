"""A pipeline schedule's effect on one training step: layers per device, microbatches in flight, idle time."""

import msgspec
import numpy as np

from meshwright.algebra.rewrites.pipeline import stage_layers
from meshwright.algebra.schedules.definition import LockstepForms, StageForms
from meshwright.algebra.schedules.forms import is_legal, lockstep_forms, stage_forms, too_many_passes
from meshwright.algebra.schedules.registry import definition
from meshwright.algebra.sizes import Number
from meshwright.cost.arrays import largest, total
from meshwright.spec.strategy import Strategy


class PipelineCost(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule on ``stages`` devices, each with ``chunks`` chunks of layers; sizes may be arrays.

    If the layers do not divide evenly, no chunk is more than one layer longer than another. ``in_lockstep`` one program
    runs on all devices, tick by tick, as in this package: with embedding and head on every stage, and with buffers of
    the size that the worst device needs; ``names``, the blocks of the model's layers, say how many layers its stages
    run (`stage_layers`). Other software has a program for each stage. ``sums_last``: replicas sum their gradients after
    the backward pass.
    """

    schedule: str = "1f1b"
    stages: Number = 1
    chunks: Number = 1
    microbatches: Number = 1
    in_lockstep: bool = True
    names: tuple[str, ...] = ()
    sums_last: bool = False

    @property
    def is_one(self) -> Number:
        """True where the pipeline has one stage."""
        return np.asarray(self.stages) == 1

    @property
    def runs(self) -> Number:
        """Number of chunks of all stages: stages x chunks."""
        return np.asarray(self.stages * self.chunks)

    def layers_held(self, num_layers: int, block: str = "") -> Number:
        """Returns the layers of the device with the most layers; with a ``block`` of ``names`` only its layers."""
        num_runs = self.runs
        if not self.in_lockstep or len({*self.names}) < 2:
            return np.ceil(num_layers / num_runs) * self.chunks
        run_counts, count_indices = np.unique(num_runs, return_inverse=True)
        # one stage runs all layers of the step; a server's step may have layers of only one stack
        num_in_all = self.names.count(block) if block else num_layers

        def in_pattern(num_stages: int) -> int:
            pattern = stage_layers(self.names, num_stages).pattern
            # one stage also runs layers outside the main stack
            return pattern.count(block) if block else len(pattern)

        layers_by_count = np.array([in_pattern(int(n)) if n > 1 else num_in_all for n in run_counts])
        return layers_by_count[count_indices].reshape(num_runs.shape) * self.chunks

    def layers_beside_head(self, num_layers: int) -> Number:
        """Returns how many layers fewer the device with the head has than the device with the most.

        If layers do not divide evenly, libraries shorten the first and the last chunk (Megatron's
        ``account_for_loss_in_pipeline_split``); one program for all stages does not.
        """
        max_layers = self.layers_held(num_layers)
        num_missing = np.ceil((max_layers * self.stages - num_layers) / 2)
        return np.where(self.is_one | self.in_lockstep, 0.0, np.minimum(num_missing, max_layers / self.chunks))

    def share(self, num_layers: int, block: str = "") -> Number:
        """Returns the share of all layers on the device with the most layers; with a ``block`` the share of its layers:
        one program for all stages has the same number of a block's layers on every device."""
        num_in_block = self.names.count(block)
        if not self.in_lockstep or num_in_block in (0, num_layers):
            return self.layers_held(num_layers) / num_layers
        return self.layers_held(num_layers, block) / num_in_block

    @property
    def _forms(self) -> StageForms | LockstepForms:
        return lockstep_forms(self.schedule) if self.in_lockstep else stage_forms(self.schedule)

    @property
    def _sizes(self) -> tuple[Number, Number, Number]:
        return np.asarray(self.stages), np.asarray(self.microbatches), np.asarray(self.chunks)

    def _slots(self, buffer: str) -> Number:
        return getattr(lockstep_forms(self.schedule), buffer)(*self._sizes)

    @property
    def stash(self) -> Number:
        """Microbatches whose results the fullest device keeps, each counted by the share of its layers that has run."""
        num_stashed = self._forms.stash(*self._sizes)
        return np.where(self.is_one, 1.0, num_stashed / np.asarray(self.chunks) if self.in_lockstep else num_stashed)

    @property
    def running_stash(self) -> Number:
        """Microbatches whose results one program keeps besides the stash, for the running pass; 1 is a microbatch in
        all layers. 0 if the stash has one slot, which the pass uses directly."""
        num_slots = np.round(self.stash * np.asarray(self.chunks))
        return np.where(self.is_one | (not self.in_lockstep) | (num_slots == 1), 0.0, 1 / np.asarray(self.chunks))

    @property
    def pending_stash(self) -> Number:
        """Microbatches that await a separate pass for weight gradients; 1 is one microbatch in all layers of a device.

        0 outside lockstep: other software keeps the inputs of that pass in the stash.
        """
        if not self.in_lockstep:
            return np.where(self.is_one, 0.0, 0.0)
        return np.where(self.is_one, 0.0, self._slots("handed") / np.asarray(self.chunks))

    @property
    def messages(self) -> tuple[Number, Number, Number]:
        """Buffer slots for received streams, for received cotangents, and for results that await the loss head."""
        has_several = ~self.is_one
        if not self.in_lockstep:
            return has_several * 1, has_several * 1, has_several * 0
        return has_several * self._slots("x"), has_several * self._slots("dx"), has_several * self._slots("head")

    @property
    def weight_copies(self) -> Number:
        """Stages whose weights one device runs: two if microbatches enter the pipeline at both ends."""
        return np.where(self.is_one, 1, definition(self.schedule).stage_placement.weight_copies)

    def copies(self, part: str) -> Number:
        """Returns how many stages' weights, gradients or optimizer state one device stores.

        One program stores weights once and during a step also the weights of both stages it runs (see `meetings` in
        `algebra.rewrites.split_backward`), and gradients of both.
        """
        num_copies = self.weight_copies
        if not self.in_lockstep or part == "gradients":
            return num_copies
        return np.where(num_copies == 1, 1, num_copies + 1) if part == "weights" else np.ones_like(num_copies)

    @property
    def sums(self) -> Number:
        """Stages whose gradients one device sums over replicas, and whose weights it updates, once a step."""
        return np.ones_like(self.weight_copies) if self.in_lockstep else self.weight_copies

    def ends_held(self, sizes: list[Number]) -> Number:
        """Returns the sum of ``sizes`` of embedding and head if one device stores both, else the larger."""
        if self.in_lockstep or self._ends_share is not None:
            return total(sizes)
        return np.where(self.is_one, total(sizes), largest(sizes))

    @property
    def _ends_share(self) -> float | None:
        return definition(self.schedule).stage_placement.ends_share

    @property
    def end_shares(self) -> tuple[Number, Number]:
        """Shares of the microbatches for which the busiest device runs the embedding and the head."""
        end_share = self._ends_share
        embed_share, head_share = (0.0, 1.0) if end_share is None else (end_share, end_share)
        return np.where(self.is_one, 1.0, embed_share), np.where(self.is_one, 1.0, head_share)

    def ends_computed(self, sizes: list[Number]) -> Number:
        """Returns seconds of embedding and head per microbatch on the busiest device, from the ``sizes`` of each."""
        busiest_s = largest(sizes) if self._ends_share is None else total(sizes) * self._ends_share
        return np.where(self.is_one, total(sizes), busiest_s)

    @property
    def num_sends(self) -> Number:
        """Sends in one direction that a step waits for; 0 for one stage."""
        return np.where(self.is_one, 0.0, self._forms.sends(*self._sizes))

    @property
    def split_share(self) -> Number:
        """Share of the microbatches with a split backward pass, on the device with most of them."""
        num_split = stage_forms(self.schedule).split(*self._sizes)
        return np.where(self.is_one, 0.0, num_split / np.asarray(self.microbatches))

    def bubble_s(self, forward_s: Number, backward_s: Number, weight_s: Number) -> Number:
        """Returns the idle seconds of a step, from the seconds of one microbatch in all layers of a device.

        ``backward_s`` computes the gradients of inputs, ``weight_s`` the gradients of weights.
        """
        return np.where(self.is_one, 0.0, self._forms.bubble_s(*self._sizes, forward_s, backward_s, weight_s))


ONE_STAGE = PipelineCost()


def schedule_fits(schedule: str, *, stages: Number, chunks: Number, microbatches: Number) -> Number:
    """True where a schedule runs with these sizes, which may be arrays; one stage of one chunk always does."""
    is_fit = is_legal(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    return is_fit | ((np.asarray(stages) == 1) & (np.asarray(chunks) == 1))


def schedule_refusal(schedule: str, *, stages: int, chunks: int, microbatches: int) -> str:
    """Returns why a schedule does not run with these sizes, or has too many passes to be priced."""
    schedule_form = definition(schedule)
    refusal_text = schedule_form.refusal(stages, microbatches, chunks)
    return refusal_text or too_many_passes(schedule_form, stages, microbatches, chunks)


def strategy_pipeline(strategy: Strategy, *, in_lockstep: bool = True, names: tuple[str, ...] = ()) -> PipelineCost:
    """Returns the pipeline of one strategy; ``names`` are the blocks of the model's layers."""
    return PipelineCost(
        schedule=strategy.schedule,
        stages=strategy.mesh.get("pipeline", 1),
        chunks=strategy.chunks,
        microbatches=strategy.num_microbatches,
        in_lockstep=in_lockstep,
        names=names,
        sums_last=strategy.gradient_sync != "overlapped",
    )
