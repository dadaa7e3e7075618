"""A small tokenizer, chat templates in the manner of four families, and records, for tests of chats."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot|>' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' }}
    {%- for tool in tools %}{{- tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.reasoning_content and enable_thinking is not false %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.turn = ns.turn + 1 %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}{% endfor %}"
)
GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if role == 'model' -%}
        {%- generation -%}{{ message['content'] | trim + '<end_of_turn>\\n' }}{%- endgeneration -%}
    {%- else -%}
        {{ message['content'] | trim + '<end_of_turn>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA}
SPECIAL = ("<pad>", "<s>", "</s>", "<|header|>", "<|/header|>", "<|eot|>", "<|im_start|>", "<|im_end|>", "[INST]")

USER, ANSWER = "What is 2 + 2? Say  it.", " It is 4 -- “four” ünd so on."
CHAT = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
LONGER = [*CHAT, {"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "Six.\n\nSix is 3 + 3."}]
CHATS = [
    {"messages": CHAT},
    {"messages": LONGER},
    {"messages": [{**one, "name": None} for one in CHAT]},
    {"messages": [{**CHAT[0]}, {**CHAT[1], "reasoning": "two and two"}]},
]
THOUGHT = [CHATS[3]["messages"], LONGER]
TOOLS = [{"name": "add", "text": "<a> & b", "strict": True}]
PAIRS = [{"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": LONGER[:3], "completion": LONGER[3:]}]
PLAIN = [
    {"prompt": "The sky is", "completion": " blue."},
    {"prompt": "One, two, ", "completion": "three, four</s>"},
    {"prompt": "Merge the en", "completion": "d of the prompt."},
]
FORMS = {
    "messages": CHATS,
    "pairs": PAIRS,
    "plain": PLAIN,
    "tools": [{"messages": chat, "tools": TOOLS} for chat in THOUGHT],
    "kwargs": [{"messages": chat, "chat_template_kwargs": {"enable_thinking": False}} for chat in THOUGHT],
}


def write_tokenizer(folder: Path, template: str | None = None, *, bos: bool = True) -> Path:
    """Writes a tokenizer trained on the records, with its configuration and template, and returns its folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(one, ensure_ascii=False) for one in CHATS + PLAIN], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_records(path: Path, records: list[dict]) -> str:
    """Writes JSON lines and returns their path as text."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")
    return str(path)
