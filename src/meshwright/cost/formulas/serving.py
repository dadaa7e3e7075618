"""Formulas of serving: tokens of a step with drafts, experts that a batch reads, time that decode waits for prefills.

Sizes may be NumPy arrays.
"""

import numpy as np

from meshwright.algebra.sizes import Number


def experts_read(num_tokens: Number, *, num_experts: Number, active_experts: Number) -> Number:
    """Returns the mean number of distinct experts that B tokens pick, each k of E at random: E (1 - (1 - k/E)^B)."""
    return num_experts * (1 - (1 - active_experts / num_experts) ** num_tokens)


def waiting_s(prefill_s: Number, *, batch: Number, output_len: Number) -> Number:
    """Returns the mean seconds that each decode step waits for prefills of new requests: (B - 1) / output_len x
    prefill.

    Under a steady load each of B sequences (``batch``) is replaced every ``output_len`` steps: while one sequence makes
    its tokens, every other one is replaced once, and it waits for these prefills, whole or in chunks."""
    seconds: Number = np.maximum(np.asarray(batch) - 1, 0) / output_len * prefill_s
    return seconds


def expected_tokens(acceptance: Number, num_drafts: Number) -> Number:
    """Returns the mean tokens of a step that checks K drafts, each right with probability a: (1 - a^(K+1)) / (1 - a).

    K + 1 if a is 1. Source: Leviathan et al. 2022, equation 1; How to Scale Your Model, section 7.2.1.
    """
    a = np.asarray(acceptance, dtype=float)
    is_sure = a == 1
    tokens = np.where(is_sure, num_drafts + 1, (1 - a ** (num_drafts + 1)) / np.where(is_sure, 1, 1 - a))
    return tokens if tokens.ndim else float(tokens)
