"""Chooses the shapes for which an engine compiles its steps, and the shape that a given step runs in."""

from collections.abc import Sequence

from meshwright.algebra.generation.cache import source_len
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedShape, PackedStep, sizes_up_to
from meshwright.serve.request import TokenRequest


class StepShapes:
    """The shapes of a packed step: `decode` (each row a sequence) and `chunks` (several rows of a sequence).

    A step runs in the smallest fitting shape that is ``ready`` (compiled), else in the smallest fitting one, compiled
    then. Raises InputError if ``limits`` differ from the step's sizes or the policy does not suit its mask or batch
    invariance, and CannotRunError for a mask that needs arrays which requests do not have.
    """

    def __init__(self, step: PackedStep, limits: SchedulerLimits) -> None:
        step_sizes = step.max_seqs, step.storage.page_len, step.cache_sizes["Pg"]
        given_sizes = limits.max_requests, limits.page_len, limits.num_pages
        if given_sizes != step_sizes:
            names = "limits (max_requests, page_len, num_pages)"
            raise InputError(f"{names} = {given_sizes} differ from the step's {step_sizes}. Give limits like these.")
        if step.mask_fields and (limits.prefix_cache or limits.policy == "chunked"):
            raise InputError(
                f"attention_mask={step.model.attention_mask!r} lets positions of a prompt see later ones. Give limits "
                "with the policy interleaved, which prefills whole prompts, and no prefix cache."
            )
        if bad_names := [name for name in step.mask_fields if name in ("enter", "leave")]:
            raise CannotRunError(
                f"attention_mask={step.model.attention_mask!r} reads {bad_names[0]} of each sequence, which no request "
                "has. Use another mask, or give it to PackedStep.step."
            )
        self._limits, self._num_owners = limits, step.num_owners
        self.sources = SourceShapes(step, limits.token_budget // step.num_owners) if step.model.encoder else None
        self.ready = set[PackedShape]()
        max_rows = {
            "chunked": limits.token_budget,
            # a single prompt may exceed the budget
            "interleaved": max(limits.token_budget, step.num_owners * step.max_len),
            "static": step.max_seqs * step.max_len,
        }[limits.policy]
        if not step.batch_invariant:
            max_decode_rows = step.max_seqs * (1 + limits.num_drafts)
            self.set_decode_sizes(_divisible(sizes_up_to(max_decode_rows, halves_from=8), step.row_parts(1)))
            self._set_chunk_sizes(_divisible(sizes_up_to(max_rows, least=16 * step.num_owners), step.row_parts(2)))
            return
        if max_rows > ALIKE_ROWS:
            raise InputError(
                f"a batch-invariant engine has steps of at most {ALIKE_ROWS} tokens, and the limits need {max_rows:,}. "
                f"Give a token_budget and max_requests of at most {ALIKE_ROWS}, and the policy chunked."
            )
        self.set_decode_sizes([ALIKE_ROWS])  # until the engine has found which other sizes give the same bits
        self._set_chunk_sizes([])

    def set_decode_sizes(self, sizes: Sequence[int]) -> None:
        """Sets the shapes of decode steps to these numbers of rows, in ascending order."""
        self.decode = [PackedShape(num_rows, num_rows, num_rows, 1) for num_rows in sizes]

    def _set_chunk_sizes(self, sizes: Sequence[int]) -> None:
        max_seqs = self._limits.max_requests
        rows_and_seqs = [(num_rows, min(max_seqs, num_rows)) for num_rows in sizes]
        # the second shape of a size has logits of all rows, for log-probabilities of prompts
        self.chunks = [
            PackedShape(num_rows, num_seqs, num_outputs, num_rows // self._num_owners)
            for num_rows, num_seqs in rows_and_seqs
            for num_outputs in dict.fromkeys((num_seqs, num_rows))
        ]

    def first(self, requests: Sequence[TokenRequest] = ()) -> list[PackedShape]:
        """Returns shapes, of chunks and decode, that fit every step without logits of all rows: the largest, or the
        smallest that suffice if the engine runs only ``requests``."""
        plain_shapes = [shape for shape in self.chunks if shape.outputs == shape.sequences]
        if not requests or not plain_shapes:
            return [*plain_shapes[-1:], self.decode[-1]]
        rows_each = 1 + self._limits.num_drafts
        requests_each, slots_each = -(-len(requests) // self._num_owners), self._limits.max_requests // self._num_owners
        num_running = self._num_owners * min(requests_each, slots_each)
        num_rows = num_running * max(rows_each, *(len(request.prompt) for request in requests))
        chunk_shape = next((shape for shape in plain_shapes if shape.rows >= num_rows), plain_shapes[-1])
        return [chunk_shape, next(shape for shape in self.decode if shape.rows >= num_running * rows_each)]

    @property
    def every(self) -> list[PackedShape]:
        """All shapes in the order to compile them: small shapes first, shapes with logits of all rows last."""
        plain_shapes = [shape for shape in self.chunks if shape.outputs == shape.sequences]
        scoring_shapes = [shape for shape in self.chunks if shape.outputs > shape.sequences]
        return [*plain_shapes[:1], *self.decode, *plain_shapes[1:], *scoring_shapes]

    def fitting(self, rows: int, outputs: int, *, alone: bool) -> PackedShape:
        """Returns the shape for a step of ``rows`` rows, ``outputs`` with logits; ``alone``: all rows decode."""
        # a batch-invariant engine has decode shapes only
        holding_shapes = [shape for shape in self.decode if shape.rows >= rows] if alone or not self.chunks else []
        holding_shapes += [shape for shape in self.chunks if shape.rows >= rows and shape.outputs >= outputs]
        return next((shape for shape in holding_shapes if shape in self.ready), holding_shapes[0])


MOST_SOURCES = 8
"""Maximum number of sources of each owner that the encoder reads in one batch."""


class SourceShapes:
    """The compiled shapes of encoder batches: one source of each owner, or as many as the token ``budget`` has room for
    (at most 8). Source lengths are padded to powers of two; features have one length."""

    def __init__(self, step: PackedStep, budget: int) -> None:
        num_parts, position_parts = step.source_parts
        self._each, self._num_owners, self._budget = num_parts // step.num_owners, step.num_owners, budget
        most = source_len(step.model)
        has_features = step.model.encoder is not None and step.model.encoder.features > 0  # features: one length
        self._lengths = [most] if has_features else _divisible(sizes_up_to(most, least=16), position_parts)

    def fitting(self, longest: int, most: int) -> tuple[int, int]:
        """Returns (sources per owner, positions) of the shape for ``most`` sources of up to ``longest`` positions."""
        length = next(size for size in self._lengths if size >= longest)
        room = min(MOST_SOURCES, max(1, self._budget // length))
        return self._each * (1 if most == 1 else room), length

    def every(self, requests: Sequence[TokenRequest] = ()) -> list[tuple[int, int]]:
        """Returns all shapes (sources of all owners, positions), or only the shapes that ``requests`` need."""
        lengths, counts = [len(request.source) for request in requests] or self._lengths, (1, 2)[: len(requests) or 2]
        shapes = {self.fitting(length, most) for length in lengths for most in counts}
        return sorted((num_each * self._num_owners, length) for num_each, length in shapes)


def _divisible(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Returns the sizes rounded up to multiples of ``num_parts``, ascending, without duplicates."""
    return sorted({-(-size // num_parts) * num_parts for size in sizes})
