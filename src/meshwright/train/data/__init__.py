"""Data of a training run: texts become token stores, and token stores become batches."""
