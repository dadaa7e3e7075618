"""Chat templates as transformers renders them: those of tests/data/templates, and published ones that TRL ships."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from meshwright.core.errors import InputError
from meshwright.nn.hf.chat_template import BEGIN, END, read_chat_templates
from meshwright.nn.hf.tokenizer import special_tokens

OURS = sorted((Path(__file__).parents[2] / "data" / "templates").glob("*.jinja"))
TRL = importlib.util.find_spec("trl")
PUBLISHED = "cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 gemma4 glm4moe gptoss lfm2_v2 llama3 llama3_1 "
PUBLISHED += "llama3_2 nemotron_3_nano phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3 qwen3_5_think qwen3_instruct_2507 qwen3_vl"
THEIRS = [Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja" for name in PUBLISHED.split() if TRL]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

ARGUMENTS = {"city": "Zürich", "days": 2}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather <now>", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def called(arguments, content=""):
    """A question, a call with these arguments, and what it gave."""
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    answer = say("tool", "sunny", tool_call_id="call00001", name="get_weather")
    return [say("user", "weather?"), say("assistant", content, tool_calls=[call]), answer]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


HI, PROMPT = say("user", "hi"), {"add_generation_prompt": True}
PLAIN = {
    "one": ([HI], PROMPT),
    "system": ([say("system", "Be brief."), HI], PROMPT),
    "empty system": ([say("system", ""), HI], PROMPT),
    "turns": ([HI, say("assistant", " hello\n"), say("user", "more <b>"), say("assistant", "ok")], {}),
    "continued": ([HI, say("assistant", "hello the")], {"continue_final_message": True}),
    "continued after a space": ([HI, say("assistant", "hello the ")], {"continue_final_message": True}),
    "tools": ([HI], {"tools": TOOLS, **PROMPT}),
    "a call": (called(ARGUMENTS), {"tools": TOOLS, **PROMPT}),
    "reasoning": ([HI, say("assistant", "2", reasoning_content="so"), HI, say("assistant", "4", reasoning="hm")], {}),
    "a variable": ([HI], {"enable_thinking": False, **PROMPT}),
    "documents": ([HI], {"documents": [{"title": "One", "text": "First"}], **PROMPT}),
}
LIST = ([say("user", parts("hello", "there"))], PROMPT)
TEXT = ([say("user", "hello\nthere")], PROMPT)


def folder_of(source, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    (folder / "chat_template.jinja").write_text(source)
    return folder


def rendered(chats, messages, given):
    more = {name: value for name, value in given.items() if name != "tools"}
    try:
        return chats.render(messages, given.get("tools"), **more).replace(BEGIN, "").replace(END, "")
    except InputError:
        return None


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", [*OURS, *THEIRS], ids=lambda file: file.stem)
def test_templates_render_as_transformers_renders_them(file, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = file.read_text()
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)
    peer.chat_template = source
    chats = read_chat_templates(folder_of(source, tmp_path))

    def theirs(messages, given):
        try:
            return peer.apply_chat_template(messages, tokenize=False, **given)
        except Exception:  # a template may raise anything
            return None

    cases = dict(PLAIN)
    if theirs(*PLAIN["a call"]) is None:  # it joins arguments as text, or has no calls
        cases.pop("a call")
    found = {name: rendered(chats, *case) for name, case in cases.items()}
    assert found == {name: theirs(*case) for name, case in cases.items()}
    assert found["one"]
    assert found["turns"]
    # What OpenAI's clients send has the text of what templates read.
    assert rendered(chats, *LIST) in (theirs(*LIST), theirs(*TEXT))
    assert "hello" in rendered(chats, *LIST)
    assert "'text'" not in rendered(chats, *LIST)
    given = {"tools": TOOLS, **PROMPT}
    texts = called(json.dumps(ARGUMENTS, ensure_ascii=False))
    as_text, as_object = theirs(texts, given), theirs(called(ARGUMENTS), given)
    ours = rendered(chats, texts, given)
    assert ours in (as_text, as_object)
    assert ours is None or r"{\"city" not in ours


def test_a_call_without_content_is_written_where_the_template_asks_for_a_null(tmp_path):
    source = next(file for file in OURS if file.stem == "deepseek").read_text()
    chats = read_chat_templates(folder_of(source, tmp_path))
    wanted = (
        "<s><｜User｜>weather?<｜Assistant｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": 1}\n```<｜tool▁call▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>'
    )
    assert chats.render(called('{"city": 1}', None)) == chats.render(called({"city": 1}, None)) == wanted


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        ("{{ 'x' + c.arguments }}", '{"a": 1}', 'x{"a": 1}'),
        ("{{ 'x' + c.arguments }}", "not JSON", "xnot JSON"),
        ("{{ c.name }}{{ c.arguments | tojson }}", '{"a":1}', 'f{"a": 1}'),
        ("{{ c.name }}{{ c.arguments if c.arguments is string else c.arguments | tojson }}", '{"a":1}', 'f{"a":1}'),
        ("{{ c.name }}{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", '{"a":1}', "fa=1"),
        ("{{ c.name }}", None, "f"),
    ],
)
def test_arguments_are_given_in_the_form_that_the_template_reads(source, arguments, text, tmp_path):
    source = f"{{% set c = messages[0].tool_calls[0].function %}}f{source.replace('{{ c.name }}', '')}"
    chats = read_chat_templates(folder_of(source, tmp_path))
    function = {"name": "f", "arguments": arguments}
    message = say("assistant", None, tool_calls=[{"type": "function", "function": function}])
    assert chats.render([message]) == f"f{text.removeprefix('f')}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": True}, "does not write the last message, which is to be continued"),
        ({}, "refuses it: not this"),
    ],
)
def test_refusals_say_why(given, said, tmp_path):
    source = "{% if add_generation_prompt is false and not open %}{{ raise_exception('not this') }}{% endif %}x"
    chats = read_chat_templates(folder_of(source, tmp_path))
    with pytest.raises(InputError, match=said):
        chats.render([HI], open="continue_final_message" in given, **given)


def test_templates_lie_where_transformers_reads_them(tmp_path):
    def read(tools=None, **files):
        for file in tmp_path.rglob("*.*"):
            file.unlink()
        for name, content in files.items():
            place = tmp_path / name.replace("__", "/").replace("DOT", ".")
            place.parent.mkdir(exist_ok=True)
            place.write_text(content if isinstance(content, str) else json.dumps(content))
        chats = read_chat_templates(tmp_path)
        return chats and chats.render([HI], tools)

    config, default = "tokenizer_configDOTjson", "chat_templateDOTjinja"
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert [read(tools, **{config: {"chat_template": listed}}) for tools in (None, TOOLS)] == ["a", "b"]
    more = {"additional_chat_templates__tool_useDOTjinja": "d"}
    assert [read(tools, **{default: "c", **more}) for tools in (None, TOOLS)] == ["c", "d"]
    assert read(TOOLS, **{config: {"chat_template": listed}, default: "c"}) == "c"
    assert read(**{"chat_templateDOTjson": {"chat_template": "e"}}) == "e"
    assert read(**{default: "\ufeffc"}) == "c"
    assert read(**{config: {}}) is None


def test_special_tokens_are_those_of_transformers(tmp_path):
    """From either file, with variables of the folder's own; the older file counts where the newer has no numbers."""
    config = {"bos_token": {"content": "<s>"}, "image_token": "<i>", "pad_token": None, "model_max_length": 8}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": {"boi": "<b>"}}))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "</s>", "cls_token": {"content": "<c>"}})
    )
    own = {"bos_token": "<s>", "image_token": "<i>", "boi": "<b>"}
    assert special_tokens(tmp_path) == own | {"eos_token": "</s>", "cls_token": "<c>"}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ boi }}{{ eos_token }}{{ pad_token }}")
    assert read_chat_templates(tmp_path).render([HI]) == "<s><b></s>"
    numbered = config | {"extra_special_tokens": {"boi": "<b>"}, "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(numbered))
    assert special_tokens(tmp_path) == own


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("zephyr", "</s>"), ("llama2", "</s>")])
def test_what_ends_an_answer_is_read_off_the_template(name, end, tmp_path):
    source = next(file for file in OURS if file.stem == name).read_text()
    assert read_chat_templates(folder_of(source, tmp_path)).turn_end == end
