"""Reads published config.json files and sets what they count beside transformers: ``python -m tests.public_configs
FOLDER ...``, folders of folders with a config.json, and a SOURCE that names the repository it comes from.

A row has parameters, and bytes of the caches of one sequence of 5,000 positions in bfloat16, beside an encoder with its
source: as a service's memory has them, and as the arrays of transformers' static cache have after a step on the meta
device. That cache has whole keys and values where attention is latent; there the outputs of the projection to latents
count. Of a multimodal model the text half is read. Where only quantization_config is refused, the rest is compared.
"""

import argparse
import json
import multiprocessing
import re
import resource
import warnings
from collections import Counter
from pathlib import Path

from meshwright.algebra.generation.cache import ONE_DEVICE
from meshwright.algebra.generation.program import Storage
from meshwright.core.errors import UserError
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.setting import Setting
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.job import Job
from meshwright.spec.weights import num_params

POSITIONS = 5_000
WIDTH = 2
"""Bytes of an element of a cache."""
CHILD_BYTES, CHILD_S = 12 << 30, 240
NEEDS = re.compile(r"model_type '\w[-\w]*' needs (.*), which this version does not have\.")
SAME_SHAPES = {"kimi_k2": "deepseek_v3"}
"""Types that transformers does not have -> those whose code such models publish under another name."""


def ours(keys: dict, name: str) -> tuple[tuple[int, int], int]:
    """Parameters and bytes of caches, and the positions of a source."""
    model = model_from_config(keys, name)
    source = model.encoder.length if model.encoder else 0
    setting = Setting(
        model,
        parse_cluster("h100:1x1"),
        Job(kind="decode", batch_seqs=1, seq_len=POSITIONS),
        storage=Storage(page_len=1),  # so that no page is filled in part
        known=source,
    )
    cache_bytes = memory_parts(setting.derived(ONE_DEVICE), setting.sizes(ONE_DEVICE)).cache_bytes
    shown_bytes = kv_cache_bytes(model, POSITIONS + source)
    assert cache_bytes == shown_bytes, f"a service has {cache_bytes:,} bytes of caches, show says {shown_bytes:,}"
    return (num_params(model), int(cache_bytes)), source


def theirs(keys: dict, source: int) -> tuple[int, int]:
    """Parameters and bytes of caches of transformers' model on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers import AutoModelForSpeechSeq2Seq as AutoModelForSpeech

    torch.distributions.Distribution.set_default_validate_args(False)  # which reads numbers; Gemma 3n has some
    keys = {key: value for key, value in keys.items() if key not in ("quantization_config", "auto_map")}
    kind = keys.pop("model_type")
    config = AutoConfig.for_model(SAME_SHAPES.get(kind, kind), **keys)
    text = config if config.is_encoder_decoder else config.get_text_config()
    whole = config if hasattr(config, "tie_word_embeddings") else text  # wrappers say it for their decoder
    is_tied = text.tie_word_embeddings = whole.tie_word_embeddings
    classes = (AutoModelForSeq2SeqLM, AutoModelForSpeech) if config.is_encoder_decoder else (AutoModelForCausalLM,)
    auto = next((one for one in classes if type(text) in one._model_mapping), AutoModel)
    with torch.device("meta"):
        model = auto.from_config(text, dtype=torch.bfloat16)
        counted = {name: array for name, array in model.named_parameters() if not name.endswith("correction_bias")}
        total = sum(array.numel() for array in counted.values())
        is_own_head = config.is_encoder_decoder and keys.get("tie_word_embeddings") is False
        if is_own_head and "lm_head.weight" not in counted:  # transformers ties it until it has read weights
            total += model.lm_head.weight.numel()
        if auto is AutoModel and not is_tied:
            total += text.vocab_size * text.hidden_size
        return total, _cache_bytes(model, text, source)


def _cache_bytes(model, text, source: int) -> int:
    """Bytes of the static cache's arrays after one step."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    kept = list[int]()
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts"):  # whose loops read numbers, of which there are none here
            module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
        if name.endswith("kv_a_proj_with_mqa"):
            module.register_forward_hook(lambda _, __, output: kept.append(output.shape[-1]))
        if name.endswith("query_key_value"):  # Falcon repeats these for every query head before it keeps them
            module.register_forward_hook(lambda _, __, out: kept.append(out.shape[-1] - text.hidden_size))
    cache = StaticCache(config=text, max_cache_len=POSITIONS)
    token = torch.zeros((1, 1), dtype=torch.long)
    if not source:
        model(input_ids=token, past_key_values=cache, use_cache=True)
        layers = cache.layers
    else:
        cache = EncoderDecoderCache(cache, DynamicCache())
        rows = torch.zeros((1, source, text.d_model), dtype=torch.bfloat16)
        model(encoder_outputs=(rows,), decoder_input_ids=token, past_key_values=cache, use_cache=True)
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    if kept:
        return sum(kept) * POSITIONS * WIDTH
    used = (layer for layer in layers if layer.is_initialized and layer.keys is not None)
    return sum(array.numel() for layer in used for array in (layer.keys, layer.values)) * WIDTH


def in_child(keys: dict, source: int) -> tuple[int, int] | str:
    """What `theirs` says, or in one line why it does not, from a process of bounded memory and time."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
        try:
            there.send(theirs(keys, source))
        except Exception as error:
            there.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")

    child = context.Process(target=run)
    child.start()
    said = here.recv() if here.poll(CHILD_S) else f"no answer in {CHILD_S} s"
    child.kill()
    child.join()
    return said


def row(file: Path) -> tuple[str, str]:
    """The verdict on a file and its row."""
    keys, name, note = json.loads(file.read_text(encoding="utf-8")), file.parent.name, ""
    source_file = file.with_name("SOURCE")
    origin = f" ({source_file.read_text().split(':')[0].strip()})" if source_file.exists() else ""
    kind = " / ".join(str(part["model_type"]) for part in (keys, keys.get("text_config", {})) if "model_type" in part)
    start = f"{name}{origin}, {kind}: "
    try:
        try:
            found = ours(keys, name)
        except UserError as error:
            if "quantization_config" not in str(error):
                raise
            note = " but for the quantisation, which is refused"
            found = ours({key: value for key, value in keys.items() if key != "quantization_config"}, name)
    except UserError as error:
        reason = str(error).removeprefix(f"{name}: ").split(" Known: ")[0]
        needed = NEEDS.match(reason)
        return f"refused: {needed[1] if needed else 'other reasons'}", f"{start}refused: {reason}"
    except Exception as error:
        return "failed", f"{start}{type(error).__name__}: {error}"
    counts, source = found
    said = in_child(keys, source)
    figures = "{:,} parameters, {:,} bytes of caches".format(*counts)
    if isinstance(said, str):
        return "not compared", f"{start}{figures}; transformers: {said}"
    if said == counts:
        return "equal", f"{start}{figures}, equal{note}"
    return "different", f"{start}{figures}; transformers: {said[0]:,} and {said[1]:,}{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    folders = parser.parse_args().folders
    warnings.simplefilter("ignore")
    import torch  # before the children, which share it
    import transformers

    verdicts = Counter[str]()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {POSITIONS:,} positions")
    for file in (file for folder in folders for file in sorted(folder.glob("*/config.json"))):
        verdict, line = row(file)
        verdicts[verdict] += 1
        print(line, flush=True)
    print()
    for verdict, count in verdicts.most_common():
        print(f"{count} {verdict}")


if __name__ == "__main__":
    main()
