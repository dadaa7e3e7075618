"""Published configs are read as they are: as many parameters as transformers counts, or one line that says why not.

`tests/data/configs.json` has them by the name of their repository on the Hugging Face hub, with the keys of the
config.json there, and the parameters that transformers counts on the meta device; null where a config is refused.
"""

import json
import warnings
from pathlib import Path

import pytest

from meshwright.core.errors import FileWarning, InputError
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.weights import num_params

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "configs.json").read_text())
READ = [name for name, one in PUBLISHED.items() if one["params"]]
NAMED = {"HuggingFaceTB/SmolLM2-1.7B-Instruct": ["is_llama_config"]}
"""Keys that are named in a warning."""


@pytest.mark.parametrize("name", READ)
def test_published_configs_have_the_parameters_that_transformers_counts(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FileWarning)
        assert num_params(model_from_config(PUBLISHED[name]["config"], name)) == PUBLISHED[name]["params"]
    assert [str(one.message).split("'")[1] for one in caught] == NAMED.get(name, [])


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - READ))
def test_others_are_refused_in_one_line(name):
    config = PUBLISHED[name]["config"]
    with pytest.raises(InputError) as caught:
        model_from_config(config, name)
    said = "the key 'dual_chunk_attention_config' of a qwen2 config is not known"
    assert (said if config["model_type"] == "qwen2" else f"{config['model_type']!r} is not known") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_transformers_counts_them_so(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    keys = PUBLISHED[name]["config"]
    keys = {key: value for key, value in keys.get("text_config", keys).items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]["params"]
