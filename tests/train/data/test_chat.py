"""Chats as tokens, beside what transformers makes of them; TRL's own trainer is compared in test_trl.py."""

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from meshwright.core.errors import InputError
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.data.chat import open_chat_tokenizer
from meshwright.train.data.text import TextPiece, open_corpus
from meshwright.train.data.tokenizer import open_tokenizer
from meshwright.train.settings import TrainSettings, with_whole_paths
from tests.train.data.chats import CHATS, FORMS, PAIRS, PLAIN, TEMPLATES, write_records, write_tokenizer


def open_folder(folder, loss_on="completion"):
    return open_chat_tokenizer(folder, open_tokenizer(folder, vocab_size=300), loss_on=loss_on)


def encoded(folder, record, loss_on="completion"):
    """The tokens of a record, and which of them have a loss."""
    piece = TextPiece(msgspec.json.encode(record).decode(), True, 0, "chats.jsonl line 1")
    (found,) = np.array(open_folder(folder, loss_on).encode([piece]))
    return np.maximum(found, ~found).tolist(), (found >= 0).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_and_masked_as_transformers_does(name, tmp_path):
    folder = write_tokenizer(tmp_path, TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    for record in [*FORMS["messages"], *FORMS["tools"], *FORMS["kwargs"]]:
        given = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
        wanted = theirs.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True, **given
        )
        assert encoded(folder, record) == (wanted["input_ids"], [True] * len(wanted["input_ids"]))
        assert encoded(folder, record, "assistant") == (wanted["input_ids"], list(map(bool, wanted["assistant_masks"])))
    for record in PAIRS:
        whole = theirs.apply_chat_template(record["prompt"] + record["completion"], return_dict=True)["input_ids"]
        before = theirs.apply_chat_template(record["prompt"], return_dict=True, add_generation_prompt=True)["input_ids"]
        assert whole[: len(before)] == before
        assert encoded(folder, record) == (whole, [place >= len(before) for place in range(len(whole))])
        assert encoded(folder, record, "all") == (whole, [True] * len(whole))


def test_plain_prompts_and_completions_begin_and_end_as_the_tokenizer_says(tmp_path):
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, TEMPLATES["llama"]))
    for record in PLAIN:
        tokens, counted = encoded(tmp_path, record)
        text = record["prompt"] + record["completion"].removesuffix("</s>") + "</s>"
        assert tokens == theirs(text)["input_ids"]
        assert tokens[0] == theirs.bos_token_id
        assert counted == sorted(counted)
        # Tokens merge over the end of a prompt: what differs from the prompt alone counts.
        alone = theirs(record["prompt"])["input_ids"]
        assert counted.index(True) == next(i for i, t in enumerate(tokens) if t != (*alone, None)[i])


def test_records_stay_whole_in_rows_and_what_is_cut_before_its_answer_is_said(tmp_path):
    folder = write_tokenizer(tmp_path / "qwen", TEMPLATES["qwen"])
    data = write_records(
        tmp_path / "chats.jsonl",
        [*CHATS, {"messages": [{"role": "user", "content": "a " * 200}, *CHATS[0]["messages"]]}],
    )
    lengths = [len(encoded(folder, {"messages": one["messages"]})[0]) for one in CHATS]
    seq_len = 2 * max(lengths)
    for packing, rows in ((True, 2), (False, 4)):
        given = TrainSettings(data=data, tokenizer=str(folder), loss_on="assistant", packing=packing, held_out=0.0)
        found = open_data(given, vocab_size=300, folder=tmp_path / "kept")
        batches = Batches(found.train, batch_seqs=rows, seq_len=seq_len, seed=0)
        assert sum(len(one.rows) for one in batches.samples) == rows
        (note,) = batches.notes
        assert f"4 records {'packed' if packing else 'padded'} into {rows} rows of {seq_len}" in note
        assert note.endswith(f"0 cut, 1 left out: nothing to predict in their first {seq_len} tokens")
        whole = batches.rows(0)
        assert batches.num_labels(0) == np.count_nonzero(whole["labels"] >= 0)
        tokens = sorted(
            len(tokens)
            for row in range(rows)
            for tokens in np.split(whole["tokens"][row], np.flatnonzero(np.diff(whole["documents"][row])) + 1)
            if tokens.any()
        )
        assert tokens == sorted(lengths)


def test_parquet_and_folders_hold_chats_too(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = write_tokenizer(tmp_path / "qwen", TEMPLATES["qwen"])
    (tmp_path / "chats").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(CHATS), tmp_path / "chats" / "a.parquet")
    (tmp_path / "chats" / "README.md").write_text("Not a chat.")
    corpus = open_corpus(str(tmp_path / "chats"))
    assert corpus.is_chat
    lines = open_corpus(write_records(tmp_path / "chats.jsonl", CHATS))
    encode = open_folder(folder).encode
    assert encode(list(corpus.pieces())) == encode(list(lines.pieces()))
    # A field that is named is text, and so is a record that has one.
    assert not open_corpus(f"{tmp_path / 'chats.jsonl'}#messages").is_chat
    assert not open_corpus(write_records(tmp_path / "both.jsonl", [{"text": "a", "messages": []}])).is_chat


@pytest.mark.parametrize(
    ("template", "loss_on", "record", "said"),
    [
        ("gemma", "completion", {"messages": [{"role": "system", "content": ""}]}, "template refuses it: no system"),
        ("gemma", "completion", {"messages": "x"}, "line 1 is no chat. Give messages="),
        ("gemma", "completion", {"messages": []}, "line 1 is no chat"),
        ("gemma", "completion", {"prompt": "x", "completion": [1]}, "line 1 is no chat"),
        ("gemma", "assistant", {"prompt": "x", "completion": "y"}, "lists for train.loss_on=assistant"),
        ("gemma", "assistant", {"messages": CHATS[0]["messages"][:1]}, "no message of the assistant, but of user"),
        ("gemma", "assistant", {"messages": [{"role": "assistnat", "content": "a"}]}, "but of assistnat"),
        ("{{ messages[0].x.y.z }}", "completion", CHATS[0], "line 1: the chat template refuses it"),
        ("{{ [].__class__.__mro__ }}", "completion", CHATS[0], "the chat template refuses it: access to attribute"),
        ("gemma", "completion", {"messages": CHATS[0]["messages"], "tools": "{"}, "the chat template refuses it"),
        ("gemma", "completion", {"messages": [{"role": "user", "content": "\ufdd0"}]}, "has the code '.ufdd0'"),
        ("{% for %}", "completion", CHATS[0], "the chat template of .* is not valid: "),
        ("{{ messages }}", "assistant", CHATS[0], "does not mark what the assistant says"),
        (None, "completion", CHATS[0], "has no chat template: neither chat_template.jinja nor one in"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_gives_one_line(template, loss_on, record, said, tmp_path):
    folder = write_tokenizer(tmp_path, TEMPLATES.get(template, template))
    with pytest.raises(InputError, match=said) as error:
        encoded(folder, record, loss_on)
    assert "\n" not in str(error.value)


def test_prompts_and_completions_as_texts_need_no_template(tmp_path):
    """As TRL's SFTTrainer: joined as they are, with the end token once, which a completion may have already."""
    folder = write_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(folder)
    for completion in ("b c", f"b c{theirs.eos_token}"):
        whole = theirs(f"a b {completion.removesuffix(theirs.eos_token)}{theirs.eos_token}")["input_ids"]
        before = len(theirs("a b ")["input_ids"])
        ids, counted = encoded(folder, {"prompt": "a b ", "completion": completion})
        assert ids == whole
        assert counted[before:] == [True] * (len(whole) - before)
        assert not any(counted[: before - 1])
    with pytest.raises(InputError, match=r"line 1 is a chat, and .* has no chat template: neither"):
        encoded(folder, {"prompt": CHATS[0]["messages"][:1], "completion": CHATS[0]["messages"][1:2]})


@pytest.mark.parametrize("loss_on", ["completion", "assistant"])
@pytest.mark.parametrize("said", [{}, *({"content": one} for one in (None, 3, {"a": 1})), {"tool_calls": []}])
def test_a_message_that_says_nothing_is_refused(loss_on, said, tmp_path):
    folder = write_tokenizer(tmp_path, TEMPLATES["qwen"])
    record = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", **said}]}
    with pytest.raises(InputError, match="line 1: message 2, of role 'assistant', has no content that is a text"):
        encoded(folder, record, loss_on)


def test_a_template_may_lie_in_the_configuration_one_of_several(tmp_path):
    folder = write_tokenizer(tmp_path)
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    several = [{"name": "default", "template": TEMPLATES["gemma"]}, {"name": "tool_use", "template": TEMPLATES["qwen"]}]
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode({**config, "chat_template": several}))
    theirs = AutoTokenizer.from_pretrained(folder)
    for record in (FORMS["messages"][0], FORMS["tools"][0]):
        wanted = theirs.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True)
        assert encoded(folder, record)[0] == wanted["input_ids"]


def test_chats_need_a_tokenizer(tmp_path):
    data = write_records(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(InputError, match=r"needs train\.tokenizer: it says how chats and pairs become tokens"):
        open_data(TrainSettings(data=data), vocab_size=300, folder=tmp_path)


def test_the_tokenizer_of_the_weights_renders_chats(tmp_path):
    folder = write_tokenizer(tmp_path / "published", TEMPLATES["qwen"])
    data = write_records(tmp_path / "chats.jsonl", CHATS)
    weights = with_whole_paths(TrainSettings(data=data, weights=str(folder), held_out=0.0))
    found = open_data(weights, vocab_size=300, folder=tmp_path / "kept")
    assert len(found.train[0].store) == sum(len(encoded(folder, one)[0]) for one in CHATS)


def test_bad_chats_are_left_out_and_counted(tmp_path):
    """What is not JSON, what is no chat, also where it comes first, and what the template refuses."""
    folder = write_tokenizer(tmp_path / "gemma", TEMPLATES["gemma"])
    bad = [{"id": 1}, {"messages": "x"}, {"messages": [{"role": "system", "content": "x"}]}]
    bad += [{"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": content}]} for content in (None, 3)]
    data = write_records(tmp_path / "chats.jsonl", [bad[0], CHATS[0], *bad[1:], CHATS[1]])
    with open(data, "r+") as file:
        lines = file.read()
        file.seek(0)
        file.write("{\n" + lines)
    given = TrainSettings(data=data, tokenizer=str(folder), skip_bad_records=True, held_out=0.0)
    for _ in range(2):  # the second reads what the first has kept
        found = open_data(given, vocab_size=300, folder=tmp_path / "kept")
        assert found.skipped_records == 6
        assert found.train[0].store.num_documents == 2
    with pytest.raises(InputError, match="line 1 is not a JSON object"):
        open_data(msgspec.structs.replace(given, skip_bad_records=False), vocab_size=300, folder=tmp_path / "kept")
    write_records(tmp_path / "chats.jsonl", bad[1:])
    with pytest.raises(InputError, match="every record is bad and left out"):
        open_data(given, vocab_size=300, folder=tmp_path / "kept")
