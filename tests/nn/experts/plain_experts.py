"""A layer of routed experts in NumPy, float64, token by token and expert by expert, from the papers' formulas."""

import numpy as np


def softmax(x):
    shifted = np.exp(x - x.max())
    return shifted / shifted.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def choose(scores, correction=0.0, *, num_chosen, shares="softmax", sum_to_one=True, scale=1.0, **grouped):
    """(experts, weights) of one token; ``correction`` is added to the shares that choose."""
    share = softmax(scores) if shares == "softmax" else sigmoid(scores)
    groups, worth_of = grouped.get("groups", 0), share + correction
    allowed = set(range(len(scores)))
    if groups:
        parts = np.split(np.arange(len(scores)), groups)
        worth = [worth_of[p].max() if shares == "softmax" else np.sort(worth_of[p])[-2:].sum() for p in parts]
        allowed = {expert for g in np.argsort(worth)[::-1][: grouped["groups_per_token"]] for expert in parts[g]}
    experts = sorted(allowed, key=lambda expert: -worth_of[expert])[:num_chosen]
    weights = share[experts]
    return experts, scale * (weights / weights.sum() if sum_to_one else weights)


def silu(x):
    return x * sigmoid(x)


def expert(x, gate, up, down):
    """One gated feed-forward expert."""
    return (silu(x @ gate) * (x @ up)) @ down


def layer(x, router, gates, ups, downs, *, capacity=None, **form):
    """y[N, D] of tokens x[N, D] in order, and the choices that found their expert full."""
    used, dropped, y = [0] * len(gates), [], np.zeros_like(x)
    for token, row in enumerate(x):
        for number, weight in zip(*choose(row @ router, **form), strict=True):
            if capacity is not None and used[number] == capacity:
                dropped.append((token, number))
                continue
            used[number] += 1
            y[token] += weight * expert(row, gates[number], ups[number], downs[number])
    return y, dropped


def balance_loss(scores, num_chosen):
    """E times the sum over experts of the choices per token and the mean share."""
    load, importance = np.zeros(scores.shape[1]), np.zeros(scores.shape[1])
    for row in scores:
        load[choose(row, num_chosen=num_chosen)[0]] += 1
        importance += softmax(row)
    return scores.shape[1] * (load / len(scores)) @ (importance / len(scores))


def router_z_loss(scores):
    """Mean of the square of log(sum(exp(scores)))."""
    return np.mean([np.log(np.exp(row).sum()) ** 2 for row in scores])
