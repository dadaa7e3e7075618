"""Combines the priced steps of a fleet into services: engines that do both phases, and pools of engines for each.

In the steady state of an engine that does both phases (aggregated) for B sequences, each sequence that ends makes room
for a prompt, and all other sequences wait for its prefill. While a sequence makes its ``output`` tokens, each of the
other B - 1 is replaced once; before its first token a sequence waits for its own prefill:

    TPOT = t_step + (B - 1) / output * t_prompt,  with t_prompt the seconds of a prefill over its number of prompts,
    requests/s of an engine = B / (output * TPOT + t_prompt).

Prompts that replace the sequences ending in one step, E = (B - 1) / output of them, are prefilled together. Of d
devices that have sequences of their own some have no prompt then, and wait for the devices that have one: after
1 - exp(-E) of the steps there is a prefill, so that t_prompt is max((1 - exp(-E)) / E, 1 / d) of a prefill of one
prompt on each device.

With pools (disaggregated) TPOT = t_step, a prefill engine takes 1 / t_prompt prompts a second, and a decode engine ends
B / (output * t_step) sequences. P prefill and G decode engines balance if P / t_prompt = B G / (t_step output). At low
load the time to the first token is one prefill, with pools plus sending the keys and values of all its prompts.

Aggregated engines stop for whole prompts: the longest time between two tokens (ITL) is t_step + t_prefill. If prompts
are cut into chunks of C tokens, one chunk runs with each step: ITL is t_step + t_chunk for a prompt's last chunk, the
first token comes after prompt / C such steps, and t_prompt is the time of all chunks. The batch stays full if (B - 1)
prompt / C <= output. With pools ITL is t_step. With drafts t_step is, but for ITL, divided by the tokens of a step.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright.algebra.generation.cache import sequence_bytes
from meshwright.cost.arrays import map_figures, select
from meshwright.cost.formulas.serving import waiting_s
from meshwright.plan.serving.engines import PricedFleet
from meshwright.plan.serving.fleet import PREFILL_LAYOUTS, transfer_bytes_per_s
from meshwright.plan.serving.service import TARGETS, Service


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Services, an entry each; ``decode`` and ``prefill`` are indices of the steps of a `PricedFleet`.

    ``num_prefill`` engines only prefill: 0 if the ``num_decode`` engines do both phases. ``num_chips`` are the chips
    that are paid for: all of the cluster or, for a load, all of the engines. ``free_bytes`` are free per chip, on the
    fullest chips. ``requests_per_s`` is the capacity, ``served_per_s`` at most the load. ``serves`` is False if the
    cluster has too few chips for the load. ``itl_s`` is the longest time between two tokens. Prompts are cut into
    chunks of ``chunk_len`` tokens; 0: they are not cut.
    """

    pools: np.ndarray
    decode: np.ndarray
    prefill: np.ndarray
    num_decode: np.ndarray
    num_prefill: np.ndarray
    num_chips: np.ndarray
    step_s: np.ndarray
    tpot_s: np.ndarray
    ttft_s: np.ndarray
    transfer_s: np.ndarray
    prompt_s: np.ndarray
    requests_per_s: np.ndarray
    served_per_s: np.ndarray
    tokens_per_s_per_chip: np.ndarray
    free_bytes: np.ndarray
    serves: np.ndarray
    itl_s: np.ndarray
    chunk_len: np.ndarray

    def __len__(self) -> int:
        return len(self.decode)

    def meets(self, service: Service) -> np.ndarray:
        """Returns a Boolean array: True for services that meet all targets of ``service``."""
        is_met = [getattr(self, TARGETS[name]) <= target for name, target in service.targets.items()]
        return np.asarray(np.all([np.ones(len(self), dtype=bool), *is_met], axis=0))


def all_services(priced: PricedFleet) -> Services:
    """Returns every service whose engines fit in memory; some need more chips than the cluster has for the load."""
    service_groups = [_aggregated(priced), *_pools(priced)]
    services: Services = map_figures(lambda *columns: np.concatenate(columns), *service_groups)
    return services


def _aggregated(priced: PricedFleet) -> Services:
    """Returns the services whose engines both prefill and decode, with each number of prompts per prefill."""
    service, decode, prefill, num_choices = priced.service, priced.decode, priced.prefill, len(priced.prompts_at_once)
    rows = np.repeat(np.arange(len(decode)), num_choices)
    first_prefill_rows = (decode.engine * len(priced.stored) + decode.dtypes) * num_choices
    prefill_rows = first_prefill_rows[rows] + np.tile(np.arange(num_choices), len(decode))
    extra_bytes = np.maximum(prefill.memory["activations"][prefill_rows] - decode.memory["activations"][rows], 0.0)
    free_bytes = priced.room - decode.need[rows] - extra_bytes
    is_fit = (free_bytes >= 0) & np.isfinite(prefill.step_s[prefill_rows])
    # as many prompts are prefilled together as sequences end in a step, on each device that has its own
    num_ending = decode.batch[rows] / service.output_len / priced.fleet.batch_shards[decode.engine[rows]]
    num_at_once = np.tile(priced.prompts_at_once, len(decode))
    is_fit &= (num_at_once == 1) | (num_at_once < 2 * num_ending)
    rows, prefill_rows, free_bytes = rows[is_fit], prefill_rows[is_fit], free_bytes[is_fit]
    chunk_figures = _chunked(priced, rows, prefill_rows)
    is_usable = np.isfinite(chunk_figures["itl_s"])
    rows, prefill_rows, free_bytes = (column[is_usable] for column in (rows, prefill_rows, free_bytes))
    chunk_figures = {name: column[is_usable] for name, column in chunk_figures.items()}
    batch_seqs, step_s, output_len = decode.batch[rows], decode.token_s[rows], service.output_len
    tpot_s = step_s + waiting_s(chunk_figures["prompt_s"], batch=batch_seqs, output_len=output_len)
    rate = batch_seqs / (output_len * tpot_s + chunk_figures["prompt_s"])
    num_chips = priced.fleet.num_chips[decode.engine[rows]]
    limit = priced.fleet.cluster.num_chips // num_chips
    num_engines = limit if service.requests_per_s is None else np.ceil(service.requests_per_s / rate).astype(np.int64)
    return _services(
        priced,
        pools=np.zeros(len(rows), dtype=bool),
        decode=rows,
        prefill=prefill_rows,
        num_decode=num_engines,
        num_prefill=np.zeros(len(rows), dtype=np.int64),
        num_chips=num_engines * num_chips,
        tpot_s=tpot_s,
        transfer_s=np.zeros(len(rows)),
        requests_per_s=num_engines * rate,
        free_bytes=free_bytes,
        **chunk_figures,
    )


def _chunked(priced: PricedFleet, decode_rows: np.ndarray, fill_rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the chosen chunk length of each service with its ITL, its TTFT and its seconds per prompt.

    Chooses the length with the shortest TTFT among those that meet the ITL target; if none meets it, the length with
    the shortest ITL, infinite if no length can be used. Prompts are not cut if several are prefilled at once. A step
    has one chunk on each device that has its own sequences.
    """
    service, decode, num_choices = priced.service, priced.decode, len(priced.prompts_at_once)
    step_s, prefill_s, engines = decode.step_s[decode_rows], priced.prefill.step_s[fill_rows], fill_rows // num_choices
    # prompts that take the place of the sequences that end in a step
    num_ending = np.maximum(decode.batch[decode_rows] - 1, 0) / service.output_len
    num_rounds = np.maximum(num_ending / priced.prefill.batch[fill_rows], 1)
    shards = priced.fleet.batch_shards[decode.engine[decode_rows]]
    # prompts at once on a device, over the share of a step that a prompt costs
    num_shared = priced.prefill.batch[fill_rows] / shards / together(num_ending, shards)
    lengths, gaps_s, firsts_s, prompts_s = [0], [step_s + num_rounds * prefill_s], [prefill_s], [prefill_s / num_shared]
    for chunk_len, (first_s, last_s) in priced.chunks.items():
        num_chunks = -(-service.new_prompt_tokens // chunk_len)
        lengths.append(chunk_len)
        gap_s = step_s + last_s[engines]
        gaps_s.append(np.where((fill_rows % num_choices == 0) & (num_ending / shards * num_chunks <= 1), gap_s, np.inf))
        # a chunk attends to more the later it comes; none is quicker than its part of a whole prompt
        mean_s = (first_s[engines] + last_s[engines]) / 2
        prompt_s = np.maximum(service.new_prompt_tokens / chunk_len * mean_s, prefill_s)
        firsts_s.append(num_chunks * step_s + prompt_s)
        prompts_s.append(prompt_s * together(num_ending * num_chunks, shards))
    if service.chunk_len and len(lengths) > 1:
        lengths, gaps_s, firsts_s, prompts_s = lengths[1:], gaps_s[1:], firsts_s[1:], prompts_s[1:]
    gap_s, ttft_s, row_ids = np.stack(gaps_s), np.stack(firsts_s), np.arange(len(decode_rows))
    is_met = gap_s <= (service.itl_s or np.inf)
    index = np.where(is_met.any(axis=0), np.argmin(np.where(is_met, ttft_s, np.inf), axis=0), np.argmin(gap_s, axis=0))
    figures = {"itl_s": gap_s, "ttft_s": ttft_s, "prompt_s": np.stack(prompts_s)}
    return {"chunk_len": np.array(lengths)[index], **{name: column[index, row_ids] for name, column in figures.items()}}


def together(prompts: np.ndarray, devices: np.ndarray) -> np.ndarray:
    """Returns the share of a prefill step that each prompt costs if ``prompts`` arrive at random per decode step."""
    num_prompts = np.maximum(prompts, 1e-9)
    return np.asarray(np.maximum(-np.expm1(-num_prompts) / num_prompts, 1 / devices))


def _pools(priced: PricedFleet) -> Iterator[Services]:
    """Yields, for each pair of dtypes, the services with separate pools of engines for prefill and for decode."""
    service, decode, prefill, fleet = priced.service, priced.decode, priced.prefill, priced.fleet
    num_chips = fleet.cluster.num_chips
    link_rate = transfer_bytes_per_s(fleet.cluster)
    for pair_index, dtypes in enumerate(priced.stored):
        decode_ids = np.flatnonzero(decode.dtypes == pair_index)
        # engines whose caches are split prefill for themselves alone
        can_hand_over = np.isin(fleet.layout[prefill.engine], PREFILL_LAYOUTS)
        prefill_ids = np.flatnonzero((prefill.dtypes == pair_index) & np.isfinite(prefill.step_s) & can_hand_over)
        rows, prefill_rows = np.repeat(decode_ids, len(prefill_ids)), np.tile(prefill_ids, len(decode_ids))
        gen_chips, prefill_chips = (fleet.num_chips[s.engine[i]] for s, i in ((decode, rows), (prefill, prefill_rows)))
        decodes_per_s = decode.batch[rows] / (service.output_len * decode.token_s[rows])
        prefills_per_s = prefill.batch[prefill_rows] / prefill.step_s[prefill_rows]
        if service.requests_per_s is None:
            num_prefill, num_decode = _balanced(num_chips, prefill_chips, gen_chips, prefills_per_s, decodes_per_s)
        else:
            num_prefill = np.ceil(service.requests_per_s / prefills_per_s).astype(np.int64)
            num_decode = np.ceil(service.requests_per_s / decodes_per_s).astype(np.int64)
        num_used = num_prefill * prefill_chips + num_decode * gen_chips
        is_fit = (num_prefill > 0) & (num_decode > 0) & ((num_used <= num_chips) | (service.requests_per_s is not None))
        rows, prefill_rows, num_used = rows[is_fit], prefill_rows[is_fit], num_used[is_fit]
        sent_bytes = sequence_bytes(priced.setting.model, service.prompt_len, dtypes.storage)
        sent_s = prefill.batch[prefill_rows] * sent_bytes / (np.minimum(gen_chips, prefill_chips)[is_fit] * link_rate)
        yield _services(
            priced,
            pools=np.ones(len(rows), dtype=bool),
            decode=rows,
            prefill=prefill_rows,
            num_decode=num_decode[is_fit],
            num_prefill=num_prefill[is_fit],
            num_chips=num_used if service.requests_per_s is not None else np.full(len(rows), num_chips),
            tpot_s=decode.token_s[rows],
            transfer_s=sent_s,
            requests_per_s=np.minimum(num_prefill * prefills_per_s, num_decode * decodes_per_s)[is_fit],
            free_bytes=priced.room - np.maximum(decode.need[rows], prefill.need[prefill_rows]),
            chunk_len=np.zeros(len(rows), dtype=np.int64),
            prompt_s=prefill.step_s[prefill_rows] / prefill.batch[prefill_rows],
            itl_s=decode.step_s[rows],
            ttft_s=prefill.step_s[prefill_rows] + sent_s,
        )


def _balanced(
    num_chips: int, prefill_chips: np.ndarray, gen_chips: np.ndarray, prefills_per_s: np.ndarray, gens_per_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of prefill and of decode engines that serve the most requests a second on all chips."""
    exact_count = num_chips * gens_per_s / (prefill_chips * gens_per_s + gen_chips * prefills_per_s)
    best_count, best_rate = np.zeros(len(exact_count), dtype=np.int64), np.zeros(len(exact_count))
    for near_count in (np.floor(exact_count), np.ceil(exact_count)):
        num_prefill = np.maximum(near_count, 1).astype(np.int64)
        num_decode = np.maximum(num_chips - num_prefill * prefill_chips, 0) // gen_chips
        new_rate = np.minimum(num_prefill * prefills_per_s, num_decode * gens_per_s)
        best_count, best_rate = np.where(new_rate > best_rate, num_prefill, best_count), np.maximum(best_rate, new_rate)
    return best_count, np.maximum(num_chips - best_count * prefill_chips, 0) // gen_chips


def _services(priced: PricedFleet, **column_by_name: np.ndarray) -> Services:
    """Returns services from their columns, with the figures added that both kinds compute alike."""
    service = priced.service
    served_per_s = np.minimum(column_by_name["requests_per_s"], service.requests_per_s or np.inf)
    return Services(
        **column_by_name,
        step_s=priced.decode.step_s[column_by_name["decode"]],
        served_per_s=served_per_s,
        tokens_per_s_per_chip=served_per_s * service.output_len / column_by_name["num_chips"],
        serves=column_by_name["num_chips"] <= priced.fleet.cluster.num_chips,
    )


# -- ranking ----------------------------------------------------------------------------------------------


def ranked(found: Services, service: Service) -> np.ndarray:
    """Returns the indices of services that meet the targets and serve the load, best first.

    The best makes the most output tokens per second and chip that is paid for, so it costs the least, and needs the
    fewest chips for a load; ties are ordered by shorter TPOT, then shorter TTFT.
    """
    indices = np.flatnonzero(found.meets(service) & found.serves)
    services: Services = select(found, indices)
    return indices[np.lexsort((services.ttft_s, services.tpot_s, -services.tokens_per_s_per_chip))]


def frontier(found: Services, among: np.ndarray) -> np.ndarray:
    """Returns the indices in ``among``, most tokens first, that no other beats in both tokens per chip and TPOT."""
    min_tpot_s = np.minimum.accumulate(found.tpot_s[among])
    is_unbeaten = np.ones(len(among), dtype=bool)
    is_unbeaten[1:] = found.tpot_s[among][1:] < min_tpot_s[:-1]
    return among[is_unbeaten]
