"""The compiled shapes of an engine's steps: which there are, and which one a step takes."""

from collections.abc import Sequence

from meshwright.algebra.generation.cache import source_len
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedShape, PackedStep, sizes_up_to
from meshwright.serve.request import TokenRequest


class StepShapes:
    """The shapes of a packed step within ``limits``: `decode`, whose rows are sequences of their own, and `chunks`.

    A step takes the smallest shape that holds it and is ``ready``, so that an engine answers before all shapes have
    programs. Where none is, it takes the smallest, which is compiled then. Raises InputError for limits that are not
    those of the step, or that it cannot keep, and CannotRunError for a mask that reads more than requests have.
    """

    def __init__(self, step: PackedStep, limits: SchedulerLimits) -> None:
        step_sizes = step.max_seqs, step.storage.page_len, step.cache_sizes["Pg"]
        if (limits.max_requests, limits.page_len, limits.num_pages) != step_sizes:
            raise InputError(f"the step has {step_sizes} slots, positions of a page and pages. Give limits with these.")
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
            # one prompt alone may be above the budget
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
                f"a batch-invariant engine has steps of at most {ALIKE_ROWS} tokens, and {max_rows:,} are asked for. "
                f"Give a token_budget and max_requests of at most {ALIKE_ROWS}, and the policy chunked."
            )
        self.set_decode_sizes([ALIKE_ROWS])  # until the engine has found which others give the same bits
        self._set_chunk_sizes([])

    def set_decode_sizes(self, sizes: Sequence[int]) -> None:
        """Gives steps of single rows these numbers of rows, in order."""
        self.decode = [PackedShape(num_rows, num_rows, num_rows, 1) for num_rows in sizes]

    def _set_chunk_sizes(self, sizes: Sequence[int]) -> None:
        max_seqs = self._limits.max_requests
        rows_and_seqs = [(num_rows, min(max_seqs, num_rows)) for num_rows in sizes]
        # the second of a size has logits of all rows, for log-probabilities of prompts
        self.chunks = [
            PackedShape(num_rows, num_seqs, num_outputs, num_rows // self._num_owners)
            for num_rows, num_seqs in rows_and_seqs
            for num_outputs in dict.fromkeys((num_seqs, num_rows))
        ]

    def first(self, requests: Sequence[TokenRequest] = ()) -> list[PackedShape]:
        """Returns the shapes of which every step fits one, but one with logits of all rows: the largest, or for some
        ``requests`` alone the smallest."""
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
        """All shapes, the small ones first, last those with logits of all rows."""
        plain_shapes = [shape for shape in self.chunks if shape.outputs == shape.sequences]
        scoring_shapes = [shape for shape in self.chunks if shape.outputs > shape.sequences]
        return [*plain_shapes[:1], *self.decode, *plain_shapes[1:], *scoring_shapes]

    def fitting(self, rows: int, outputs: int, *, alone: bool) -> PackedShape:
        """Returns the shape of a step with so many rows, and of these with logits; ``alone``: all of them decode."""
        # a batch-invariant engine has no other shapes
        holding_shapes = [shape for shape in self.decode if shape.rows >= rows] if alone or not self.chunks else []
        holding_shapes += [shape for shape in self.chunks if shape.rows >= rows and shape.outputs >= outputs]
        return next((shape for shape in holding_shapes if shape in self.ready), holding_shapes[0])


MOST_SOURCES = 8
"""Sources of each owner that are read at once, at most."""


class SourceShapes:
    """The compiled shapes in which the sources of an engine are read: those of one request of each owner, or of as many
    as the ``budget`` of tokens has room for, padded to powers of two."""

    def __init__(self, step: PackedStep, budget: int) -> None:
        num_parts, position_parts = step.source_parts
        self._each, self._num_owners, self._budget = num_parts // step.num_owners, step.num_owners, budget
        most = source_len(step.model)
        has_features = step.model.encoder is not None and step.model.encoder.features > 0  # all positions of a source
        self._lengths = [most] if has_features else _divisible(sizes_up_to(most, least=16), position_parts)

    def fitting(self, longest: int, most: int) -> tuple[int, int]:
        """Returns how many sources of each owner a shape has, where any has at most so many, and their positions."""
        length = next(size for size in self._lengths if size >= longest)
        room = min(MOST_SOURCES, max(1, self._budget // length))
        return self._each * (1 if most == 1 else room), length

    def every(self, requests: Sequence[TokenRequest] = ()) -> list[tuple[int, int]]:
        """Returns all shapes, or those that some requests alone need: sources of all owners, and positions."""
        lengths, counts = [len(request.source) for request in requests] or self._lengths, (1, 2)[: len(requests) or 2]
        shapes = {self.fitting(length, most) for length in lengths for most in counts}
        return sorted((num_each * self._num_owners, length) for num_each, length in shapes)


def _divisible(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Returns sizes that devices can share, each at least one of the given."""
    return sorted({-(-size // num_parts) * num_parts for size in sizes})
