"""Files next to a folder's weights: tokenizer, chat templates, generation config; runs and conversions copy them."""

import shutil
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.core.files import write_json_whole, write_whole
from meshwright.nn.hf.chat_template import MORE_TEMPLATES, PROCESSOR_TEMPLATE, TEMPLATE, read_chat_templates
from meshwright.nn.hf.tokenizer import (
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    end_token,
    end_tokens,
    read_table,
    special_tokens,
)
from meshwright.nn.hf.weights import token_numbers

FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *(TEMPLATE, PROCESSOR_TEMPLATE, GENERATION),
)


def files_beside(folder: Path) -> list[Path]:
    """Returns a folder's tokenizer files, chat templates and generation config, as far as they exist."""
    paths = [folder / name for name in FILES if (folder / name).is_file()]
    return paths + sorted((folder / MORE_TEMPLATES).glob("*.jinja"))


def copy_beside(source: Path, folder: Path) -> list[Path]:
    """Copies `files_beside` from ``source`` to ``folder`` unchanged, and returns the copies."""
    file_copies = [(file, folder / file.relative_to(source)) for file in files_beside(source)]
    for file, copy_path in file_copies:
        write_whole(copy_path, partial(shutil.copyfile, file))
    return [copy_path for _, copy_path in file_copies]


def keep_beside(source: Path, run: Path, tokenizer: Tokenizer) -> None:
    """Copies the `files_beside` of a tokenizer's folder into the folder of a run that is trained with the tokenizer.

    The run's generation config lists every token that may end a text: the source's end tokens, the end of a document,
    and what the chat template writes after an answer, if that is one token. It also has the source's other token
    numbers."""
    if source.resolve() == run.resolve():
        return
    copy_beside(source, run)
    chat_templates = read_chat_templates(source)
    turn_end = tokenizer.token_to_id(chat_templates.turn_end) if chat_templates else None
    end_ids = (*end_tokens(source, tokenizer), end_token(tokenizer, special_tokens(source).get("eos_token")), turn_end)
    eos_ids = list(dict.fromkeys(token_id for token_id in end_ids if token_id is not None))
    config = token_numbers(source) if (source / CONFIG).is_file() else {}
    config |= read_table(run / GENERATION, remedy="remove it")
    write_json_whole(run / GENERATION, config | {"eos_token_id": eos_ids})
