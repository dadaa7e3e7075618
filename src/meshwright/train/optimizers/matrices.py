"""Which axes of a weight array make up its matrices: layers and experts count them, the rest goes in or comes out."""

from typing import NamedTuple

from meshwright.algebra.transformer import matrix_inputs, weight_variables
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight


class MatrixAxes(NamedTuple):
    """Axes of one array of `Params`: ``wo`` [L, N, H, D] is L matrices of N H inputs and D outputs.

    A vector has no inputs; all its axes but layers and experts are outputs.
    """

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether there is something to factor or to orthogonalise."""
        return bool(self.inputs)


def matrix_axes(weight: Weight) -> MatrixAxes:
    """The axes of a row of the weight table, read off its dims."""
    dims = weight.dims
    stacked, routed = int(bool(weight.layers)), int(weight.part == "experts")
    start, stop = stacked + routed, stacked + len(dims)
    axes = tuple(range(start, stop))
    inputs = len(matrix_inputs(weight))
    return MatrixAxes(tuple(range(start)), axes[:inputs], axes[inputs:])


def model_axes(model: Model) -> dict[str, MatrixAxes]:
    """Name in `Params` -> the axes of its matrices, for every array of the model."""
    return {name: matrix_axes(weight) for name, (weight, _) in weight_variables(model).items()}
