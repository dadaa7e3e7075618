"""The dense llama decoder as a layer program. Weight dims are read off the weight table."""

from meshwright.algebra.program import Program, Variable, parse_block
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.weights import Weight, weight_table

EMBED = """
x[B,T,D] = embed(tokens[B,T], embed[V,D])
"""

LAYER = """
h[B,T,D] = rms_norm(x[B,T,D], attn_norm[D])
q[B,T,N,H] = h[B,T,D] * wq[D,N,H]
k[B,T,K,H] = h[B,T,D] * wk[D,K,H]
v[B,T,K,H] = h[B,T,D] * wv[D,K,H]
qr[B,T,N,H] = rope(q[B,T,N,H], positions[B,T])
kr[B,T,K,H] = rope(k[B,T,K,H], positions[B,T])
o[B,T,N,H] = attention(qr[B,T,N,H], kr[B,T,K,H], v[B,T,K,H], positions[B,T])
a[B,T,D] = o[B,T,N,H] * wo[N,H,D]
x1[B,T,D] = add(x[B,T,D], a[B,T,D])
h1[B,T,D] = rms_norm(x1[B,T,D], mlp_norm[D])
g[B,T,F] = h1[B,T,D] * w_gate[D,F]
u[B,T,F] = h1[B,T,D] * w_up[D,F]
m[B,T,F] = silu_mul(g[B,T,F], u[B,T,F])
y[B,T,D] = m[B,T,F] * w_down[F,D]
x2[B,T,D] = add(x1[B,T,D], y[B,T,D])
"""

HEAD = """
hf[B,T,D] = rms_norm(x[B,T,D], final_norm[D])
loss[] = linear_cross_entropy(hf[B,T,D], unembed[D,V], labels[B,T])
"""

HEAD_CHUNK_TOKENS = 1024
"""Tokens per device whose logits exist at once where the loss head works in chunks (remat "full")."""

TIED_HEAD = HEAD.replace("unembed[D,V]", "embed[V,D]")


def local_name(weight: Weight) -> str:
    """The name of a weight inside its block: ``layers.wq`` -> ``wq``."""
    return weight.name.rsplit(".", 1)[-1]


def transformer(model: Model) -> Program:
    """The training program of a model: embed, layers, head.

    Raises CannotRunError for a family whose program is not written yet.
    """
    require_runnable(model)
    variables = {
        "tokens": Variable("tokens", ("B", "T"), "input"),
        "labels": Variable("labels", ("B", "T"), "input"),
        "positions": Variable("positions", ("B", "T"), "position"),
        "logits": Variable("logits", ("B", "T", "V"), "activation"),
    }
    for weight in weight_table(model):
        if not weight.tied_to:
            role = "vector" if weight.kind == "vector" else "weight"
            name = local_name(weight)
            variables[name] = Variable(name, weight.dims, role)
    head = TIED_HEAD if model.tied_embeddings else HEAD
    return Program(
        (
            parse_block("embed", EMBED, variables),
            parse_block("layer", LAYER, variables, repeat=model.num_layers, carry="x", result="x2"),
            parse_block("head", head, variables),
        ),
        variables,
    )
