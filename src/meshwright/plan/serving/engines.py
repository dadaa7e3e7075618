"""Prices every engine of a fleet in both phases of generation, for all batches and dtypes.

Steps are derived once for each phase, pair of dtypes and form (kv heads as they are, or repeated); engines and batches
are arrays.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.repeated_heads import with_repeated_heads
from meshwright.algebra.sizes import Number
from meshwright.core.errors import CannotRunError
from meshwright.core.progress import tracked
from meshwright.cost.arrays import map_figures, select
from meshwright.cost.formulas.serving import expected_tokens
from meshwright.cost.memory.chip import total_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import PricedStep
from meshwright.cost.work.kernels import StepCost
from meshwright.cost.work.sequences import LikeSequences
from meshwright.cost.work.slots import SlotSizes
from meshwright.plan.legal import size_rules
from meshwright.plan.rules import StrategySizes, mask
from meshwright.plan.serving.fleet import OTHER_AXES, Fleet, engine_strategy
from meshwright.plan.serving.service import Service, Speculation
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.spec.job import Job
from meshwright.spec.strategy import LAYOUTS, Strategy

BOUNDS = ("parameters", "KV", "FLOPs", "network", "host", "other")
"""Parts of a step's time: loading weights, loading the KV cache, products and attention, collectives, the host (the
engine's work between steps, and starts of kernels outside CUDA graphs), and the rest (elementwise traffic,
launches)."""

MAX_BATCH_POWER = 14
"""Batches that are tried: powers of two up to 2^14 per device that has its own sequences, and the largest that fits."""

PREFILL_TOKENS = 16_384
"""Most new tokens per device for which several prompts are prefilled in one step."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Priced steps of one phase, an entry each: index of the engine, index of its dtypes, sequences of the engine,
    seconds, seconds of each of `BOUNDS` (and of drafting) without overlap, and bytes per chip of weights, caches and
    the rest. A decode step checks ``drafts`` drafts of each sequence and makes ``tokens`` tokens on average."""

    engine: np.ndarray
    dtypes: np.ndarray
    batch: np.ndarray
    step_s: np.ndarray
    bounds_s: dict[str, np.ndarray]
    memory: dict[str, np.ndarray]
    drafts: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.engine)

    @property
    def need(self) -> np.ndarray:
        """Bytes of memory that each step needs per chip."""
        return sum_of(self.memory)

    @property
    def token_s(self) -> np.ndarray:
        """Seconds per token of each sequence."""
        return np.asarray(self.step_s / self.tokens)


class PricedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The priced steps of a fleet. ``decode`` has the decode steps that fit, at the mean length of a sequence with
    memory for its full length. ``prefill`` has an entry for every engine, pair of dtypes and number of prompts at once,
    in this order; its seconds are infinite where it does not fit. ``least_bytes`` is the least memory of any engine, of
    ``least_chips`` chips, with one sequence for each device that has its own. ``chunks`` maps a chunk length to the
    seconds of a prompt's first and last chunk, for every engine and pair of dtypes (infinite for engines that only
    prefill)."""

    setting: Setting
    service: Service
    fleet: Fleet
    stored: tuple[StoredDtypes, ...]
    decode: Steps
    prefill: Steps
    prompts_at_once: tuple[int, ...]
    least_bytes: float
    least_chips: int
    chunks: dict[int, np.ndarray]

    @property
    def room(self) -> float:
        """Bytes of a chip that an engine may use: its memory less the margin."""
        return self.setting.memory_room


def sum_of(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the sum of the arrays of a dictionary."""
    return np.asarray(np.sum(list(parts.values()), axis=0))


def price_fleet(setting: Setting, service: Service, fleet: Fleet, stored: Sequence[StoredDtypes]) -> PricedFleet:
    """Prices all engines of a fleet; ``setting`` has the model, the cluster and the rates.

    Raises CannotRunError if the sizes of no engine that can decode divide the model's.
    """
    num_new = service.new_prompt_tokens
    num_prompts = tuple(1 << power for power in range(15) if power == 0 or (num_new << power) <= PREFILL_TOKENS)
    decode_steps, prefill = list[Steps](), list[tuple[np.ndarray, Steps]]()
    chunk_lens = () if setting.model.encoder else service.chunks
    chunk_s_by_len = {chunk_len: np.full((2, len(fleet) * len(stored)), np.inf) for chunk_len in chunk_lens}
    least_bytes, least_chips = np.inf, 0
    for pair_index, dtypes in enumerate(tracked(stored, "pricing engines by dtype")):
        for form in _forms(setting, service, fleet, dtypes):
            filled = form.prefill(num_prompts)
            # an aggregated engine prefills beside its caches: the largest batch without and with what that takes
            prefill_bytes = filled.memory["activations"].reshape(len(form.engines), -1)[:, 0]
            if "decode" in form.steps:
                steps, need = form.decode(prefill_bytes)
                if np.min(need) < least_bytes:
                    least_bytes, least_chips = float(np.min(need)), int(fleet.num_chips[form.engines[np.argmin(need)]])
                decode_steps.append(msgspec.structs.replace(steps, dtypes=np.full(len(steps), pair_index)))
                for seconds, chunk_s in zip(chunk_s_by_len.values(), form.chunk_s(tuple(chunk_s_by_len)), strict=True):
                    seconds[:, form.engines * len(stored) + pair_index] = chunk_s
            rows = (form.engines[:, None] * len(stored) + pair_index) * len(num_prompts) + np.arange(len(num_prompts))
            prefill.append((rows.ravel(), msgspec.structs.replace(filled, dtypes=np.full(len(filled), pair_index))))
    if not decode_steps:
        raise CannotRunError(
            f"no engine of {setting.model.name} on {setting.cluster.short_name} with these sizes can decode: they must "
            f"divide the model's widths, and context only splits prompts. Use other sizes of tensor and expert."
        )
    all_prefills = map_figures(lambda *columns: np.concatenate(columns), *(steps for _, steps in prefill))
    prefill_index = np.full(len(fleet) * len(stored) * len(num_prompts), -1)
    prefill_index[np.concatenate([rows for rows, _ in prefill])] = np.arange(len(all_prefills))
    prefills: Steps = select(all_prefills, np.maximum(prefill_index, 0))
    step_s = np.where((prefill_index >= 0) & (prefills.need <= setting.memory_room), prefills.step_s, np.inf)
    return PricedFleet(
        setting=setting,
        service=service,
        fleet=fleet,
        stored=tuple(stored),
        decode=map_figures(lambda *columns: np.concatenate(columns), *decode_steps),
        prefill=msgspec.structs.replace(prefills, step_s=step_s),
        prompts_at_once=num_prompts,
        least_bytes=least_bytes,
        least_chips=least_chips,
        chunks=chunk_s_by_len,
    )


class _Form(msgspec.Struct, frozen=True, kw_only=True):
    """The engines (indices) of a fleet that share the derived ``steps`` of each phase and differ only in sizes."""

    setting: Setting
    service: Service
    fleet: Fleet
    dtypes: StoredDtypes
    strategy: Strategy
    engines: np.ndarray
    steps: dict[str, Derived]

    def decode(self, beside: np.ndarray) -> tuple[Steps, np.ndarray]:
        """Returns the decode steps that fit, and the bytes per chip that each engine needs at its smallest batch.

        ``beside`` has the bytes per chip that prefill may need at the same time, for each engine.
        """
        num_shards, num_engines = self.fleet.batch_shards[self.engines], len(self.engines)
        powers = 1 << np.arange(MAX_BATCH_POWER + 1)
        rows = np.repeat(np.arange(num_engines), len(powers))
        batches = num_shards[rows] * np.tile(powers, num_engines)
        cached_len = self.service.max_len - 1
        needed_bytes = sum_of(self.memory("decode", rows, self.like(batches, 1.0, cached_len))).reshape(num_engines, -1)
        row_and_batch_arrays = [(rows, batches)]
        for extra_bytes in (np.zeros(num_engines), beside):
            multiples = _largest(needed_bytes + extra_bytes[:, None], powers, self.setting.memory_room)
            row_and_batch_arrays.append((np.arange(num_engines), num_shards * multiples))
        rows, batches = (np.concatenate(columns) for columns in zip(*row_and_batch_arrays, strict=True))
        row_batches = np.unique(np.stack([rows, batches]), axis=1)
        rows, batches = row_batches[:, row_batches[1] > 0]
        if self.service.speculation:
            return self.drafted(rows, batches, self.service.speculation), needed_bytes[:, 0]
        memory = self.memory("decode", rows, self.like(batches, 1.0, cached_len))
        has_room = sum_of(memory) <= self.setting.memory_room
        memory_that_fits: dict[str, np.ndarray] = select(memory, has_room)
        mean_sequences = self.like(batches[has_room], 1.0, self.service.mean_len - 1)
        return self.priced("decode", rows[has_room], mean_sequences, memory_that_fits), needed_bytes[:, 0]

    def drafted(self, rows: np.ndarray, batch: np.ndarray, speculation: Speculation) -> Steps:
        """Returns the decode steps that fit, each with the number of drafts that makes tokens fastest.

        A step that checks K drafts has K + 1 rows of each sequence, all with logits. Drafts take K times ``draft_cost``
        of the step without any.
        """
        tried, mean_cached = np.array(speculation.tried), self.service.mean_len - 1
        plain_steps = self.priced("decode", rows, self.like(batch, 1.0, mean_cached), {})
        shape = (len(rows), len(tried))
        all_rows, seqs, drafts = (np.repeat(rows, len(tried)), np.repeat(batch, len(tried)), np.tile(tried, len(rows)))
        memory = self.memory("decode", all_rows, self.like(seqs, drafts + 1, self.service.max_len - drafts - 1))
        steps = self.priced("decode", all_rows, self.like(seqs, drafts + 1, mean_cached), memory)
        drafting_s = drafts * speculation.draft_cost * np.repeat(plain_steps.step_s, len(tried))
        steps = msgspec.structs.replace(
            steps,
            step_s=steps.step_s + drafting_s,
            bounds_s={**steps.bounds_s, "drafts": drafting_s},
            drafts=drafts,
            tokens=expected_tokens(speculation.acceptance, drafts),
        )
        token_s = np.where(steps.need <= self.setting.memory_room, steps.token_s, np.inf).reshape(shape)
        best_rows = np.arange(len(rows)) * len(tried) + np.argmin(token_s, axis=1)
        fastest_steps: Steps = select(steps, best_rows[np.isfinite(token_s.min(axis=1))])
        return fastest_steps

    def prefill(self, at_once: Sequence[int]) -> Steps:
        """Returns a prefill step for each engine and number of prompts per device that has its own sequences.

        If a prefix of the prompt is cached, only the new tokens are computed; they attend to the prefix too.
        """
        service = self.service
        form_rows = np.repeat(np.arange(len(self.engines)), len(at_once))
        batch_seqs = self.fleet.batch_shards[self.engines[form_rows]] * np.tile(at_once, len(self.engines))
        new_tokens = service.new_prompt_tokens
        sequences = LikeSequences(batch_seqs, float(new_tokens), float(service.prompt_len - new_tokens))
        if self.setting.model.encoder:  # a source is read whole, and the first row follows
            sequences = self.like(batch_seqs, 1.0, service.prompt_len)
        return self.priced("prefill", form_rows, sequences, self.memory("prefill", form_rows, sequences))

    def like(self, count: Number, rows: Number, before: Number) -> LikeSequences:
        """Returns ``count`` sequences with ``rows`` new rows each after ``before`` positions. With an encoder the
        prompt is the source, and counts among these positions."""
        source = float(self.service.prompt_len) if self.setting.model.encoder else 0.0
        return LikeSequences(count, rows, np.maximum(before - source, 0.0), source)

    def chunk_s(self, lengths: Sequence[int]) -> np.ndarray:
        """Returns the seconds [lengths, 2, engines] of the first and the last chunk of a prompt, with one prompt on
        each device that has its own sequences. The last chunk attends to all tokens before it, and counts at least as
        long as the first."""
        if not lengths:
            return np.zeros((0, 2, len(self.engines)))
        chunk_lens = np.repeat(np.array(lengths), len(self.engines))
        form_rows = np.tile(np.arange(len(self.engines)), len(lengths))
        num_seqs = self.fleet.batch_shards[self.engines[form_rows]]
        prompt_len = self.service.prompt_len
        chunks = LikeSequences(num_seqs, chunk_lens, 0.0), LikeSequences(num_seqs, chunk_lens, prompt_len - chunk_lens)
        steps = (self.priced("prefill", form_rows, chunk, {}) for chunk in chunks)
        first_s, last_s = (step.step_s.reshape(len(lengths), -1) for step in steps)
        return np.stack([first_s, np.maximum(first_s, last_s)], axis=1)

    def memory(self, phase: str, rows: np.ndarray, like: LikeSequences) -> dict[str, np.ndarray]:
        """Returns the bytes per chip of weights, caches and the rest, an entry for each of ``rows``."""
        memory = memory_parts(self.steps[phase], self._sizes(phase, rows, like))
        items = memory.items(self._setting(phase).pipeline(self.strategy), ())
        weight_bytes, cache_bytes = (np.broadcast_to(items[name], len(rows)) for name in ("weights", "kv_cache"))
        other_bytes = np.broadcast_to(total_bytes(items), len(rows)) - weight_bytes - cache_bytes
        return {"weights": weight_bytes, "kv_cache": cache_bytes, "activations": other_bytes}

    def priced(self, phase: str, rows: np.ndarray, like: LikeSequences, memory: dict[str, np.ndarray]) -> Steps:
        """Prices a step of a phase for each of ``rows``, indices into ``engines``, with the sequences ``like``."""
        setting, derived, engines, strategy = self._setting(phase), self.steps[phase], self.engines[rows], self.strategy
        rates = setting.step_rates(strategy, self.fleet.placements, derived)
        rates = msgspec.structs.replace(rates, num_hosts=np.array([part.num_hosts for part in self.fleet.parts]))
        priced_step = PricedStep(
            derived=derived,
            sizes=self._sizes(phase, rows, like),
            rates=select(rates, engines),
            pipeline=setting.pipeline(strategy),
        )
        return Steps(
            engine=engines,
            dtypes=np.zeros(len(rows), dtype=np.int64),
            batch=like.count,
            step_s=np.broadcast_to(priced_step.seconds.step_s, len(rows)),
            bounds_s=bounds_s(priced_step, len(rows)),
            memory=memory,
            drafts=np.zeros(len(rows), dtype=np.int64),
            tokens=np.ones(len(rows)),
        )

    def _setting(self, phase: str) -> Setting:
        return phase_setting(self.setting, phase, self.dtypes, self.service.max_len)

    def _sizes(self, phase: str, rows: np.ndarray, like: LikeSequences) -> SlotSizes:
        mesh = {axis: sizes[self.engines[rows]].astype(float) for axis, sizes in self.fleet.mesh.items()}
        num_outputs = like.count * like.rows if phase == "decode" else None
        return self._setting(phase).step_sizes(self.strategy, like, mesh=mesh, outputs=num_outputs)


def phase_setting(
    setting: Setting, phase: str, dtypes: StoredDtypes, length: int, batch_seqs: int = 1, *, known: int = 0
) -> Setting:
    """Returns the setting of one step: prefill of ``length`` tokens after ``known`` cached ones, or decode against
    ``length`` positions, of which with an encoder ``known`` are the source's."""
    own_len = length - known if setting.model.encoder and phase == "decode" else length
    job = Job(kind=phase, batch_seqs=batch_seqs, seq_len=max(own_len, 1))
    return msgspec.structs.replace(setting, job=job, storage=dtypes.storage, known=known)


def _forms(setting: Setting, service: Service, fleet: Fleet, dtypes: StoredDtypes) -> Iterator[_Form]:
    """Yields the engines of a fleet grouped by layout, by whether they repeat kv heads and by whether they can decode,
    with the derived steps of their phases (engines that split prompts over ``context`` only prefill)."""
    needs_repeats = setting.model.common_kv_heads % fleet.mesh["tensor"] != 0
    needs_repeats &= ~np.isin(fleet.layout, ("sequences", "positions"))
    for is_repeated, decodes, layout in itertools.product((False, True), (True, False), LAYOUTS):
        template = engine_strategy({}, dtypes.precision, layout)
        strategy = with_repeated_heads(template) if is_repeated else template
        indices = np.flatnonzero((needs_repeats == is_repeated) & (fleet.decodes == decodes) & (fleet.layout == layout))
        if not len(indices):
            continue
        left_out_axes: tuple[str, ...] = ("context",) if decodes and layout == "prompts" else ()
        # an axis of one device would keep others from moving
        left_out_axes += ("tensor",) * bool(layout != "prompts" and (fleet.mesh["tensor"][indices] == 1).all())
        unused_axes = (*OTHER_AXES, *left_out_axes)
        derived_by_phase = {
            phase: phase_setting(setting, phase, dtypes, service.max_len).symbolic(strategy, without=unused_axes)
            for phase in (("prefill", "decode") if decodes else ("prefill",))
        }
        indices = indices[_divides(setting, fleet, indices, derived_by_phase)]
        if len(indices):
            yield _Form(
                setting=setting,
                service=service,
                fleet=fleet,
                dtypes=dtypes,
                strategy=template,
                engines=indices,
                steps=derived_by_phase,
            )


def _divides(setting: Setting, fleet: Fleet, indices: np.ndarray, derived_by_phase: dict[str, Derived]) -> np.ndarray:
    """Returns a Boolean array: True for engines whose sizes divide the model's dims; batch and length always divide."""
    mesh = {axis: sizes[indices] for axis, sizes in fleet.mesh.items()}
    dims = setting.model.dims | {
        **dict.fromkeys(("Q", "O", "Pg", "Pw"), fleet.batch_shards[indices]),
        "B": fleet.batch_shards[indices] * mesh["context"] * mesh["tensor"],
        **dict.fromkeys(("T", "S"), 1),  # rows, and sources, which are padded
        "Pl": mesh["context"],
    }
    facts = StrategySizes(model=setting.model.name, cluster="", num_chips=0, mesh=mesh, dims=dims)
    rules = [rule for derived in derived_by_phase.values() for rule in size_rules(derived)]
    return np.broadcast_to(mask(rules, facts), len(indices))


def _largest(need_bytes: np.ndarray, powers: np.ndarray, room_bytes: float) -> np.ndarray:
    """Returns the largest number of sequences per device that fits in ``room_bytes``, for each engine; 0 if none does.

    ``need_bytes`` [engines, powers] are the bytes at powers of two. Between two powers their chord is an upper bound,
    since bytes are a maximum of linear functions."""
    has_room = need_bytes <= room_bytes
    last_fit = np.maximum(has_room.sum(axis=1) - 1, 0)
    first_misfit = np.minimum(last_fit + 1, len(powers) - 1)
    rows = np.arange(len(need_bytes))
    low_bytes, high_bytes = need_bytes[rows, last_fit], need_bytes[rows, first_misfit]
    share = np.where(high_bytes > low_bytes, (room_bytes - low_bytes) / np.maximum(high_bytes - low_bytes, 1.0), 0.0)
    multiples = np.floor(powers[last_fit] + share * (powers[first_misfit] - powers[last_fit]))
    return np.where(has_room[:, 0], np.maximum(multiples, powers[last_fit]), 0).astype(np.int64)


def loads(cost: StepCost) -> str:
    """Returns which of `BOUNDS` the seconds of a local step's memory traffic count as."""
    kind = kind_of(cost.step)
    return "KV" if kind.group == "attention" else "parameters" if kind.is_einsum else "other"


def bounds_s(step: PricedStep, count: int) -> dict[str, np.ndarray]:
    """Returns the seconds of each of `BOUNDS` without overlap, as arrays of ``count`` entries."""
    s_by_bound: dict[str, Number] = dict.fromkeys(BOUNDS, 0.0)
    s_by_bound["host"] = step.times.microbatch_s + step.times.starts_s
    for cost in step.costs.all:
        if cost.step.is_collective:
            s_by_bound["network"] = s_by_bound["network"] + cost.network_s * cost.here
            continue
        s_by_bound[loads(cost)] = s_by_bound[loads(cost)] + cost.hbm_s * cost.here
        s_by_bound["FLOPs"] = s_by_bound["FLOPs"] + cost.math_s * cost.here
        s_by_bound["other"] = s_by_bound["other"] + cost.launch_s * cost.here
    return {name: np.broadcast_to(np.asarray(bound_s, dtype=float), count) for name, bound_s in s_by_bound.items()}
