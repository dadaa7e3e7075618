"""A transformer as frozen plain data: every size and switch that counting, planning or running needs."""

import math
from typing import Literal, get_args

import msgspec

from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import Checked, check_figures, shown

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt2",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo2",
    "smollm3",
    "glm4",
    "granite",
    "t5",
    "mt5",
    "umt5",
    "glm4_moe",
    "solar_open",
    "dots1",
    "exaone4",
    "exaone_moe",
    "hy_v3",
    "minimax_m2",
    "olmo3",
    "seed_oss",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "arcee",
    "starcoder2",
    "nemotron",
    "stablelm",
    "phi",
    "cohere",
    "cohere2",
    "gpt_neox",
    "falcon",
    "opt",
    "gpt_bigcode",
    "gptj",
    "bart",
    "mbart",
    "marian",
    "whisper",
    "ministral3",
    "mistral4",
    "llama4",
]
FAMILIES: tuple[str, ...] = get_args(Family)
"""Families of models that are counted and planned; `Model.runs_here` says whether a model also runs."""

RUNNABLE_ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
)
"""Activations that a runnable model may have."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    kind: str
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    fraction: float = 1.0  # of the pairs of a head that turn; the last ones stay ("proportional")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Returns ``0.1 weight ln(factor) + 1``, YaRN's factor on attention; 1 if ``factor`` is at most 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Encoder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The encoder of an encoder-decoder. ``length`` is the number of positions of a source. ``num_heads`` (each D /
    num_heads wide) and ``d_ff`` are the decoder's if they are 0. The decoder's sequences begin with ``start_token``;
    generated texts have the ``forced`` tokens after it.

    ``max_positions`` is the number of rows of its position table, 0: ``length``. With ``sinusoids`` that table is
    fixed. With ``features`` a source is an array [features, 2 length], such as a log-mel spectrogram, in place of
    tokens: two convolutions over three neighbours make the stream from it, the second at every other position.
    """

    num_layers: int
    length: int
    start_token: int = 0
    forced: tuple[int, ...] = ()
    num_heads: int = 0
    d_ff: int = 0
    max_positions: int = 0
    sinusoids: bool = False
    features: int = 0

    @property
    def start(self) -> tuple[int, ...]:
        """The first tokens of every generated text: ``start_token`` and ``forced``."""
        return (self.start_token, *self.forced)


MASK_DATA = {
    "documents": ("B", "T"),
    "prefix": ("B",),
    "lengths": ("B",),
    "is_global": ("B", "T"),
    "enter": ("B", "T"),
    "leave": ("B", "T"),
    "spans": ("B", "T"),
}
"""Name of an array that a batch may have for a mask -> its dims."""

LORA_TARGETS = {
    "q": "wq",
    "k": "wk",
    "v": "wv",
    "o": "wo",
    "gate": "w_gate",
    "up": "w_up",
    "down": "w_down",
}
"""Target of an adapter -> the weight of a layer that it adapts."""

_TARGET_GROUPS = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down"), "all-linear": tuple(LORA_TARGETS)}

GROUP = 64
"""Inputs that share a scale in a quantised base, and in int4 weights of generation: the greatest common divisor of this
number and the size of the dim."""

GROUPED = ("D", "Dl", "F", "Fw", "H", "Hf", "Fe", "Fs", "Rq", "Rkv", "Rl", "Hv", "Fx", "Hx", "Dc")
"""Dims of inputs whose groups may share a scale; the groups of D are the dim Dg."""


class Lora(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters of frozen weights: y = x W + (alpha / rank) (x A) B, in which only A and B train.

    ``targets`` are keys of `LORA_TARGETS`, or "attention", "mlp" or "all-linear". All weights of the model are frozen;
    ``base`` is the dtype of stored matrices of layers: "" for the training state's, else integers with a scale for each
    `GROUP` inputs. Defaults are PEFT's. Source: Hu et al., LoRA (2021).
    """

    rank: int = 8
    alpha: float = 8.0
    targets: str | tuple[str, ...] = "all-linear"
    base: Literal["", "int8", "int4"] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rank <= MAX_SIZE:
            raise InputError(f"lora.rank={shown(self.rank)} must be at least 1 and at most 2^40.")
        if not self.alpha > 0:
            raise InputError(f"lora.alpha={self.alpha:g} must be above 0.")
        names = (*LORA_TARGETS, *_TARGET_GROUPS)
        for name in self._named:
            if name not in names:
                raise InputError(f"lora.targets has {name!r}.{nearest(name, names)} Use some of {', '.join(names)}.")
        if not self._named:
            raise InputError(f"lora.targets is empty. Use some of {', '.join(names)}.")

    @property
    def _named(self) -> tuple[str, ...]:
        words = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return tuple(word.strip() for word in words if word.strip())

    @property
    def weights(self) -> dict[str, bool]:
        """Maps the weights of a layer that get adapters to True if ``targets`` names them, False if a group does."""
        from_groups = {name_in_group: False for name in self._named for name_in_group in _TARGET_GROUPS.get(name, ())}
        from_names = dict.fromkeys((name for name in self._named if name in LORA_TARGETS), True)
        named_by_target = from_groups | from_names
        return {weight: named_by_target[name] for name, weight in LORA_TARGETS.items() if name in named_by_target}

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return self.alpha / self.rank


MAX_LAYERS = 10_000
"""Limit on layers, far above any model: the weight table names every layer."""

MAX_SIZE = 2**40
"""Limit on sizes, far above any model, so that products of sizes stay floats."""


class StoredMatrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantised matrices of a published folder that generation keeps as they are stored: (name in the weight table,
    dtype, True if each ``group`` inputs share a scale and False if all inputs do)."""

    matrices: tuple[tuple[str, Literal["int8", "int4", "fp8"], bool], ...]
    group: int = GROUP


class Model(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and switches of one decoder, and of the encoder that it may have. Defaults are those of a plain llama; 0,
    () or None means the part is absent.

    ``d_ff`` is the width of dense feed-forward layers, ``d_ff_expert`` of one routed expert and
    ``d_ff_shared`` of all shared experts together. With latent attention (``kv_lora_rank`` > 0) ``head_dim``
    is the width of a query, ``qk_nope_head_dim + qk_rope_head_dim``. With ``relative_buckets`` the scores of attention
    have a bias of each head for each bucket of distances (T5); from ``relative_distance`` on, all distances share the
    last bucket. With ``lora`` adapters train and the weights of the model itself are frozen. Only generation reads
    ``stored``. ``attention_mask`` and ``attention_score`` are expressions of the catalogue of masks (`masks.names`),
    such as ``prefix_lm`` or ``alibi``.
    """

    name: str
    family: Family
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    max_positions: int = 2048
    weights_prefix: str = "model."

    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float = 1e-6
    norm_bias: bool = True  # of layer norms
    norm_unit_offset: bool = False  # gemma stores w and multiplies by 1 + w
    pre_norms: bool = True  # before attention and before the feed-forward block
    sum_norms: bool = False  # of the stream, after each addition to it
    embed_norm: bool = False  # of the stream before the first layer
    final_norm: bool = True  # of the stream after the last layer
    post_norms: bool = False  # after attention and after the feed-forward block
    qk_norm: bool = False
    wide_qk_norm: bool = False  # the norms of queries and keys are over all heads together
    qk_norm_last: bool = False  # they follow rope
    head_qk_norm: bool = False  # they are of the model's kind, and each head has scales of its own
    qk_unit_norm: bool = False  # rotated queries and keys are divided by their root mean square, after rope
    parallel_block: bool = False  # attention and the feed-forward block read the same stream, and add to it
    shared_norm: bool = False  # they read it through one norm

    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_fraction: float = 1.0
    rope_interleaved: bool = False  # pairs are (2 i, 2 i + 1), as they always are with latent attention
    unrotated_layers: tuple[int, ...] = ()
    rope_local_theta: float | None = None  # theta of the sliding layers where it differs
    learned_positions: bool = False
    position_offset: int = 0  # rows of the table before that of position 0
    sinusoids: bool = False  # tables of positions are sinusoids, and not trained

    activation: str = "silu"
    gated: bool = True
    embed_scale: bool = False  # gemma multiplies embeddings by sqrt(D)
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # on what attention and the feed-forward block add to the stream
    logit_divisor: float = 1.0
    logit_multiplier: float = 1.0
    logit_bias: bool = False
    fixed_logit_bias: bool = False  # that bias is stored, and not trained
    qkv_bias: bool = False
    key_bias: bool = True  # with qkv_bias keys have one too
    out_bias: bool = False
    mlp_bias: bool = False

    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    chunked_windows: bool = False  # these see a chunk up to the query: windows begin where chunks of positions do
    global_head_dim: int = 0  # width of heads in layers without a window; 0: as in the others
    num_global_kv_heads: int = 0  # likewise
    values_from_keys: bool = False  # layers without a window have no wv: values are the projection of keys
    value_norm: bool = False  # values are divided by their root mean square
    num_shared_kv_layers: int = 0  # the last ones, which read keys and values of the last own layer of their kind
    wide_shared_mlp: bool = False  # and whose feed-forward width is twice the others'
    d_ff_wide: int = 0  # feed-forward width of wide_layers
    wide_layers: tuple[int, ...] = ()
    layer_embed_dim: int = 0  # width of the embeddings of tokens that each layer has besides
    layer_vocab_size: int = 0  # rows of their tables, where later tokens have the first row; 0: as many as tokens
    layer_scale: bool = False  # the result of each layer is multiplied by a number, which is not trained
    num_streams: int = 0  # residual streams, which each layer predicts and, by what it made of one, corrects; 0: one
    active_stream: int = 0  # the one that attention and the feed-forward block read
    stream_clip: float = 0.0  # bound on the weights of both, in training; 0: none
    stream_scale: bool = False  # the layer's own embeddings read that one times a learnt vector
    laurel_rank: int = 0  # of a product beside attention, from and to the stream
    gate_sparsity: float = 0.0  # share of gates that are zero in sparse_layers, if they are normally distributed
    sparse_layers: tuple[int, ...] = ()
    attention_sinks: bool = False
    query_temper: float = 0.0  # queries grow by this times ln(1 + floor(position / temper_length))
    temper_length: int = 0
    temper_unrotated: bool = False  # in layers without rope alone, which count positions from 1
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None  # on the attention scores, in place of 1 / sqrt(H)
    attention_softcap: float | None = None
    attention_mask: str = ""  # names of `masks.names` in place of causal, for the decoder's attention to itself
    attention_score: str = ""  # a rule for its scores
    logit_softcap: float | None = None

    num_experts: int = 0
    experts_per_token: int = 0
    d_ff_expert: int = 0
    num_shared_experts: int = 0
    d_ff_shared: int = 0
    shared_expert_gate: bool = False
    router_bias: bool = False
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_correction: bool = False  # a buffer that is added to the scores which choose experts, not to their weights
    gates_sum_to_one: bool = False  # weights of the chosen experts are divided by their sum
    routed_scale: float = 1.0  # factor on the weights of the chosen experts, applied last
    weighted_inputs: bool = False  # what the chosen experts read is multiplied by the weights, not what they make
    expert_groups: int = 0  # groups of experts; a token chooses from its best groups_per_token groups; 0: from all
    groups_per_token: int = 0
    branch_norms: bool = False  # the router, routed and shared experts read the stream, and leave it, by own norms
    expert_scale: bool = False  # weights of the chosen experts are multiplied by a learnt number of each expert
    dense_layers: tuple[int, ...] = ()  # layers without experts, in a model that has experts

    num_mtp_layers: int = 0  # layers that predict tokens after the next, counted beside the model unless one trains
    mtp_weight: float = 0.0  # of the loss of that layer, which is then a part of the model; 0: it is left out

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    encoder: Encoder | None = None
    relative_buckets: int = 0
    relative_distance: int = 128
    relative_shared: bool = False  # all layers of a stack read one table of biases; else each has its own

    lora: Lora | None = None
    stored: StoredMatrices | None = None

    def __post_init__(self) -> None:
        """Raises InputError for impossible sizes and figures."""
        count_fields = {name for name in self.__struct_fields__ if isinstance(getattr(self, name), int | tuple)}
        may_be_zero = {*count_fields, "norm_eps", "mscale", "mscale_all_dim", "mtp_weight", "start_token", "forced"}
        may_be_zero |= {"features", "query_temper", "stream_clip", "gate_sparsity"}
        check_figures(self, f"{self.name}:", may_be_zero=may_be_zero, shares=("rope_fraction",))
        super().__post_init__()
        positive_fields = ["num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        positive_fields += ["max_positions", "relative_distance", *["d_ff_expert"] * (self.num_experts > 0)]
        positive_fields += ["temper_length"] * (self.query_temper > 0)
        positive_fields += ["sliding_window"] * (self.sliding_window is not None)
        if self.latent_attention or self.family.startswith("deepseek"):
            positive_fields += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        for field in positive_fields:
            if getattr(self, field) < 1:
                raise InputError(f"{self.name}: {field}={getattr(self, field)} must be at least 1.")
        for field in self.__struct_fields__:
            if isinstance(size := getattr(self, field), int) and not 0 <= size <= MAX_SIZE:
                raise InputError(f"{self.name}: {field}={shown(size)} must be at least 0 and at most 2^40.")
        if self.num_layers > MAX_LAYERS:
            raise InputError(f"{self.name}: num_layers={self.num_layers} must be at most {MAX_LAYERS}.")
        if self.values_from_keys and not self.value_norm:
            raise InputError(f"{self.name}: values_from_keys needs value_norm. Set both, or leave both out.")
        if self.num_heads % (self.num_global_kv_heads or 1) or self.global_head_dim % 2:
            raise InputError(
                f"{self.name}: global_head_dim={self.global_head_dim} must be even, and "
                f"num_global_kv_heads={self.num_global_kv_heads} must divide num_heads={self.num_heads}."
            )
        if self.num_shared_kv_layers and (self.latent_attention or -1 in map(self.kv_source, range(self.num_layers))):
            raise InputError(
                f"{self.name}: num_shared_kv_layers={self.num_shared_kv_layers} of {self.num_layers} leaves a kind of "
                f"layers without keys and values. Use fewer, so that one with and one without a window have their own."
            )
        if self.num_streams and not self.active_stream < self.num_streams > 1:
            raise InputError(
                f"{self.name}: active_stream={self.active_stream} of num_streams={self.num_streams}. Use 2 streams or "
                f"more, and an active one from 0 to {max(self.num_streams - 1, 1)}."
            )
        if self.num_streams and not self.layer_embed_dim:
            raise InputError(
                f"{self.name}: layer_embed_dim=0 with several streams. Give layers embeddings of their own."
            )
        if bool(self.wide_layers) != (self.d_ff_wide > 0) or (self.wide_layers and self.wide_shared_mlp):
            raise InputError(f"{self.name}: wide_layers need d_ff_wide, and a model without wide_shared_mlp.")
        if not 0 <= self.gate_sparsity < 1:
            raise InputError(f"{self.name}: gate_sparsity={self.gate_sparsity:g} must be at least 0 and below 1.")
        for field in ("sliding_layers", "dense_layers", "unrotated_layers", "sparse_layers", "wide_layers"):
            bad_ids = [layer for layer in getattr(self, field) if not 0 <= layer < self.num_layers]
            if bad_ids:
                raise InputError(f"{self.name}: {field} has layer {bad_ids[0]} of {self.num_layers}, counted from 0.")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.name}: num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}. "
                f"Use a divisor of {self.num_heads}."
            )
        if self.rotated_width % 2 and len(set(self.unrotated_layers)) < self.num_layers:
            name = "qk_rope_head_dim" if self.latent_attention else "head_dim"
            factor = f" times rope_fraction={self.rope_fraction:g}" if self.rope_fraction < 1 else ""
            raise InputError(
                f"{self.name}: rope rotates pairs, and {name}={getattr(self, name)}{factor} is odd. Use an even number."
            )
        if self.encoder and (self.latent_attention or min(self.encoder.num_layers, self.encoder.length) < 1):
            raise InputError(f"{self.name}: an encoder needs at least 1 layer and 1 position, and kv_lora_rank=0.")
        if self.encoder and self.d_model % (self.encoder.num_heads or 1):
            raise InputError(
                f"{self.name}: encoder.num_heads={self.encoder.num_heads} does not divide d_model={self.d_model}. "
                f"Use a divisor of {self.d_model}."
            )
        if self.encoder and not 0 <= self.encoder.start_token < self.vocab_size:
            raise InputError(
                f"{self.name}: encoder.start_token={self.encoder.start_token} is no token of the {self.vocab_size}. "
                f"Use 0 to {self.vocab_size - 1}."
            )
        self._check_rules()
        if self.encoder and self.learned_positions and self.encoder.length > (self.encoder.max_positions or MAX_SIZE):
            raise InputError(
                f"{self.name}: encoder.length={self.encoder.length} exceeds the {self.encoder.max_positions} positions "
                f"of its table. Use at most {self.encoder.max_positions}."
            )
        if self.sum_norms and self.num_experts:
            raise InputError(f"{self.name}: sum_norms needs a model without experts.")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise InputError(
                f"{self.name}: experts_per_token={self.experts_per_token} of num_experts={self.num_experts}. "
                f"Use 1 to {self.num_experts}."
            )
        if self.lora and (self.encoder or self.latent_attention):
            raise InputError(f"{self.name}: lora needs a model without encoder or latent attention. Leave lora out.")
        if self.lora and self.num_experts and not self.lora.weights.keys() <= {"wq", "wk", "wv", "wo"}:
            raise InputError(f"{self.name}: experts cannot have adapters in this version. Use lora.targets=attention.")
        if self.mtp_weight and (self.family not in ("deepseek_v3", "glm4_moe") or self.num_mtp_layers != 1):
            raise InputError(
                f"{self.name}: mtp_weight={self.mtp_weight:g} needs a deepseek_v3 or a glm4_moe with num_mtp_layers=1, "
                f"and this is a {self.family} with {self.num_mtp_layers}. Leave mtp_weight out."
            )
        num_groups, num_chosen = self.expert_groups, self.groups_per_token
        group_size = self.num_experts // max(num_groups, 1)
        has_equal_groups = num_groups and self.num_experts % num_groups == 0 and 1 <= num_chosen <= num_groups
        if num_groups and not (has_equal_groups and num_chosen * group_size >= self.experts_per_token):
            raise InputError(
                f"{self.name}: expert_groups={num_groups} and groups_per_token={num_chosen} do not suit "
                f"num_experts={self.num_experts} and experts_per_token={self.experts_per_token}. Use equal groups, and "
                f"enough of them for the experts of a token."
            )

    def _check_rules(self) -> None:
        if not (self.attention_mask or self.attention_score):
            return
        # not at the top: few models have a rule, and NumPy takes longer to load than a model to read
        from meshwright.masks.names import mask_named, score_named

        for kind, rule_of, available_names in (("mask", mask_named, MASK_DATA), ("score", score_named, ("slopes",))):
            rule_name = getattr(self, f"attention_{kind}")
            bad_data = [name for name in rule_of(rule_name).data if name not in available_names] if rule_name else []
            if bad_data:
                raise InputError(
                    f"{self.name}: attention_{kind}={rule_name!r} reads {bad_data[0]}, which no batch has. Use another."
                )

    @property
    def dims(self) -> dict[str, int]:
        """Maps letters of `core.dims` to sizes: D F N K G H V L, and the letters of further parts that it has."""
        size_by_letter = {
            "D": self.d_model,
            "F": self.d_ff,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "H": self.head_dim,
            "V": self.vocab_size,
            "L": self.num_layers,
        }
        optional_sizes = {
            "E": self.num_experts,
            "Ea": self.experts_per_token,
            "Fe": self.d_ff_expert,
            "Fs": self.d_ff_shared,
            "Rq": self.q_lora_rank,
            "Rkv": self.kv_lora_rank,
            "Hn": self.qk_nope_head_dim,
            "Hr": self.qk_rope_head_dim,
            "Hv": self.v_head_dim,
            "Hf": self.global_head_dim if self.global_head_dim != self.head_dim else 0,
            "Kf": self.num_global_kv_heads if self.num_global_kv_heads != self.num_kv_heads else 0,
            "Fw": 2 * self.d_ff if self.wide_shared_mlp and self.num_shared_kv_layers else self.d_ff_wide,
            "Dl": self.layer_embed_dim,
            "Vl": self.layer_vocab_size,
            **dict.fromkeys(("A", "Am", "Ao"), self.num_streams),
            "An": self.num_streams - 1 if self.num_streams else 0,
            "Do": self.d_model if self.num_streams else 0,
            "Rl": self.laurel_rank,
            "P": self.max_positions + self.position_offset if self.learned_positions else 0,
            "S": self.encoder.length if self.encoder else 0,
            "Ps": self._encoder_positions if self.learned_positions else 0,
            "R": self.relative_buckets,
            **self._encoder_sizes,
            "Ra": self.lora.rank if self.lora else 0,
            "Dj": 2 * self.d_model if self.mtp_weight else 0,
        }
        dims = size_by_letter | {letter: size for letter, size in optional_sizes.items() if size}
        group_size = self.stored.group if self.stored else GROUP
        return dims | {f"{dim}g": dims[dim] // math.gcd(group_size, dims[dim]) for dim in GROUPED if dim in dims}

    def dims_of_layer(self, layer: int) -> dict[str, str]:
        """Maps each dim whose size in a layer differs from most layers' to the letter of that size: {"H": "Hf"}."""
        other_dims = {} if layer in self.sliding_layers else {"H": "Hf", "K": "Kf"}
        is_wide = self.kv_source(layer) != layer if self.wide_shared_mlp else layer in self.wide_layers
        other_dims |= {"F": "Fw"} if is_wide else {}
        return {dim: other_dim for dim, other_dim in other_dims.items() if other_dim in self.dims}

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer reads: itself or, for the last ``num_shared_kv_layers``, the
        last layer with keys and values that also has, or also lacks, a window; -1 if there is none."""
        num_own, sliding_layers = self.num_layers - self.num_shared_kv_layers, self.sliding_layers
        own_layers = (own for own in range(num_own) if (own in sliding_layers) == (layer in sliding_layers))
        return layer if layer < num_own else max(own_layers, default=-1)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that compute keys and values: all but the last ``num_shared_kv_layers``."""
        return tuple(range(self.num_layers - self.num_shared_kv_layers))

    @property
    def full_heads(self) -> tuple[int, int]:
        """The number of kv heads in layers without a window, and the width of a head there."""
        return self.num_global_kv_heads or self.num_kv_heads, self.global_head_dim or self.head_dim

    @property
    def common_kv_heads(self) -> int:
        """The greatest number of devices that divides the kv heads of every layer."""
        return math.gcd(self.num_kv_heads, self.num_global_kv_heads)

    @property
    def _encoder_sizes(self) -> dict[str, int]:
        """Sizes of the encoder by letter, as far as they differ from the decoder's, and of its convolutions."""
        if (encoder := self.encoder) is None:
            return {}
        has_own_heads = encoder.num_heads not in (0, self.num_heads)
        head_sizes = {"Nx": encoder.num_heads, "Kx": encoder.num_heads, "Hx": self.d_model // (encoder.num_heads or 1)}
        own_sizes = head_sizes if has_own_heads else {}
        if encoder.d_ff not in (0, self.d_ff):
            own_sizes["Fx"] = encoder.d_ff
        if encoder.features:
            own_sizes |= {"M": encoder.features, "Sf": 2 * encoder.length, "Ct": 3, "Dc": self.d_model}
        return own_sizes

    @property
    def encoder_letters(self) -> dict[str, str]:
        """Maps letters of the decoder's sizes to the encoder's letters, where the sizes differ: N to Nx."""
        return {letter[0]: letter for letter in self._encoder_sizes if letter.endswith("x")}

    @property
    def _encoder_positions(self) -> int:
        """Number of rows of the encoder's position table; 0 without an encoder."""
        return (self.encoder.max_positions or self.encoder.length) + self.position_offset if self.encoder else 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have routed experts; () for a dense model."""
        if not self.num_experts:
            return ()
        dense_layers = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense_layers)

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Number of the layer that trains on the token after the next, which follows all others; () without it."""
        return (self.num_layers,) if self.mtp_weight else ()

    @property
    def latent_attention(self) -> bool:
        """True if keys and values pass through a low-rank latent (DeepSeek's MLA)."""
        return self.kv_lora_rank > 0

    @property
    def rotated_width(self) -> int:
        """Entries of a head that rope rotates; 0 without rope."""
        if self.learned_positions or self.relative_buckets:
            return 0
        return self.qk_rope_head_dim if self.latent_attention else int(self.head_dim * self.rope_fraction)

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores of heads that are ``head_dim`` wide."""
        return self.attention_scale_of(self.head_dim)

    def attention_scale_of(self, head_dim: int) -> float:
        """Returns the factor on the scores of heads H wide: ``attention_multiplier``, else ``1 /
        sqrt(query_pre_attn_scalar or H)``; times the square of `yarn_mscale` with latent attention and YaRN."""
        scale = self.attention_multiplier or (self.query_pre_attn_scalar or head_dim) ** -0.5
        rope_scaling = self.rope_scaling
        if self.latent_attention and rope_scaling is not None and rope_scaling.mscale_all_dim:
            scale *= yarn_mscale(rope_scaling.factor, rope_scaling.mscale_all_dim) ** 2
        return scale

    @property
    def runs_here(self) -> bool:
        """True if `nn` can run the model."""
        return not self.missing_to_run

    @property
    def missing_to_run(self) -> str:
        """Names the feature that `nn` cannot run; empty if it runs."""
        if self.router_scores == "sigmoid" and self.num_experts < 2 * self.expert_groups:
            return "groups of one expert, but the best two experts of a group rank it"
        if self.activation not in RUNNABLE_ACTIVATIONS:
            return f"activation {self.activation}"
        return ""


def require_runnable(model: Model) -> None:
    """Raises CannotRunError unless this version can run the model; counting and planning need no such check."""
    missing_text = model.missing_to_run
    if missing_text:
        raise CannotRunError(
            f"{model.name} ({missing_text}) is counted and planned but not run in this version. "
            f"Choose another model, such as tiny, llama3-8b or qwen3-30b-a3b."
        )
