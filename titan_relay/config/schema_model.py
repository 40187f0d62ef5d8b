"""Keys of the model, its mixture of experts, and the loss.

Architecture numbers have no defaults: a model is what its file says.
"""
# ruff: noqa: RUF009  (option() and section() return dataclass fields, not shared values)

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.fields import option, section

# The one home of the families' names: each is a file in titan_relay/titan/model/families. A key
# that not every one has gets a neutral default here and stands in the files of those that have it.
FamilyName = Literal["mixtral", "mla_moe", "phimoe", "qwen2_moe", "qwen3_moe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The experts of a layer and the router that chooses among them."""

    num_experts: int = option(at_least=1, titan="MoE.Config.num_experts")
    """Routed experts per layer."""

    top_k: int = option(at_least=1, titan="TokenChoiceTopKRouter.Config.top_k")
    """Experts that each token is sent to."""

    expert_dim: int = option(at_least=1, titan="RoutedExperts.Config.hidden_dim")
    """Hidden width of one expert."""

    shared_expert_dim: int = option(0, at_least=0, titan="MoE.Config.shared_experts")
    """Hidden width of the experts that every token is sent to, all of them together. 0: none."""

    score_func: Literal["softmax", "sigmoid", "sparsemixer"] = option(
        titan="TokenChoiceTopKRouter.Config.score_func"
    )
    """How router logits become scores: over all experts (softmax), each by itself (sigmoid), or
    two picks, each over the experts close to the best one left and sampled among them in training
    (sparsemixer, for phimoe)."""

    router_jitter: float = option(0.0, at_least=0, below=1, titan="")
    """For sparsemixer: experts compete whose logit is within twice this share of the best."""

    input_jitter: float = option(0.0, at_least=0, below=1, titan="")
    """For phimoe: training multiplies each number that enters router and experts by two uniforms
    from 1 - input_jitter to 1 + input_jitter. 0: off."""

    route_norm: bool = option(titan="TokenChoiceTopKRouter.Config.route_norm")
    """Divide a token's top_k scores by their sum."""

    route_scale: float = option(1.0, above=0, titan="TokenChoiceTopKRouter.Config.route_scale")
    """Factor on the scores after normalisation."""

    num_expert_groups: int = option(
        1, at_least=1, titan="TokenChoiceTopKRouter.Config.num_expert_groups"
    )
    """Groups that the experts are divided into; a token's experts come from its best groups only.
    A group's score is the sum of its two highest."""

    num_limited_groups: int = option(
        1, at_least=1, titan="TokenChoiceTopKRouter.Config.num_limited_groups"
    )
    """Groups that a token's experts may come from."""

    aux_loss_coeff: float = option(0.0, at_least=0, titan="")
    """Weight of the auxiliary load-balancing loss. 0: off."""

    aux_loss_scope: Literal["sequence", "batch"] = option(
        "sequence", titan="", needs="aux_loss_coeff > 0"
    )
    """Over which tokens an expert's share of assignments is taken for the auxiliary loss: each
    sequence by itself (the same for any number of ranks and microbatches), or one microbatch of
    all ranks (depends on the number of gradient accumulation steps)."""

    z_loss_coeff: float = option(0.0, at_least=0, titan="")
    """Weight of the router z-loss, the squared log-sum-exp of the router logits. 0: off."""

    load_balance_coeff: float | None = option(
        None, at_least=0, titan="MoE.Config.load_balance_coeff"
    )
    """Step of the per-expert bias that balances load without a loss. 0: off. none: 1e-3, or 0
    where aux_loss_coeff is on or score_func is sparsemixer."""

    @property
    def effective_load_balance_coeff(self) -> float:
        """load_balance_coeff with its default filled in; 0 means off."""
        if self.load_balance_coeff is not None:
            return self.load_balance_coeff
        return 1e-3 if self.aux_loss_coeff == 0 and self.score_func != "sparsemixer" else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Multi-head latent attention: keys and values are rebuilt from one small vector a token."""

    q_lora_rank: int = option(0, at_least=0, titan="Attention.Config.q_lora_rank")
    """Width of the vector that queries are rebuilt from. 0: queries are projected directly."""

    kv_lora_rank: int = option(0, at_least=0, titan="Attention.Config.kv_lora_rank")
    """Width of the vector that keys and values are rebuilt from."""

    qk_nope_head_dim: int = option(0, at_least=0, titan="Attention.Config.qk_nope_head_dim")
    """Width of a head's query and key without position."""

    qk_rope_head_dim: int = option(0, at_least=0, titan="Attention.Config.qk_rope_head_dim")
    """Width of a head's query and key that is rotated by position; even. All heads share this
    part of the key."""

    v_head_dim: int = option(0, at_least=0, titan="Attention.Config.v_head_dim")
    """Width of a head's value."""

    latent_norm_eps: float = option(1e-6, above=0, titan="Attention.Config.kv_norm")
    """Added to the mean square inside the RMSNorm of these small vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeConfig:
    """LongRoPE: rotary embeddings stretched for long sequences, for phimoe."""

    original_max_seq_len: int = option(0, at_least=0, titan="")
    """Longest sequence of the first training; a run with a longer training.seq_len takes the long
    factors. 0: plain rotary embeddings."""

    short_factor: tuple[float, ...] = option((), titan="")
    """Factor on each wavelength, head_dim / 2 of them, for short sequences."""

    long_factor: tuple[float, ...] = option((), titan="")
    """The same for long sequences."""

    short_mscale: float = option(1.0, above=0, titan="")
    """Factor on rotated queries and keys, for short sequences."""

    long_mscale: float = option(1.0, above=0, titan="")
    """The same for long sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture. Every number is given; there is no default model."""

    family: FamilyName = option(titan="model_spec.name")
    """Architecture the numbers below are put into."""

    dim: int = option(at_least=1, titan="Decoder.Config.dim")
    """Width of the residual stream."""

    num_layers: int = option(at_least=1, titan="Decoder.Config.layers")
    """Transformer blocks."""

    num_heads: int = option(at_least=1, titan="GQAttention.Config.n_heads")
    """Query heads."""

    num_kv_heads: int = option(0, at_least=0, titan="GQAttention.Config.n_kv_heads")
    """Key and value heads; divides num_heads. Every family but mla_moe needs it."""

    head_dim: int = option(0, at_least=0, titan="GQAttention.Config.head_dim")
    """Width of one head; even, for rotary embeddings. Every family but mla_moe needs it; that one
    has widths in [model.mla]."""

    num_dense_layers: int = option(0, at_least=0, titan="n_dense_layers of deepseek_v3")
    """First layers that have a dense feed-forward in place of the experts."""

    dense_dim: int = option(0, at_least=0, titan="FeedForward.Config.w1")
    """Hidden width of a dense layer's feed-forward."""

    vocab_size: int = option(at_least=1, titan="Decoder.Config.vocab_size")
    """Rows of the embedding; at least the tokenizer's number of tokens."""

    max_seq_len: int = option(at_least=1, titan="RoPE.Config.max_seq_len")
    """Longest sequence that rotary embeddings are prepared for; at least training.seq_len."""

    rope_theta: float = option(above=0, titan="RoPE.Config.theta")
    """Base of the rotary embeddings' wavelengths."""

    norm_eps: float = option(above=0, titan="RMSNorm.Config.eps")
    """Added to the mean square inside every RMSNorm."""

    tie_word_embeddings: bool = option(titan="Decoder.Config.enable_weight_tying")
    """Use the embedding's weights as the output head's."""

    init_std: float = option(0.02, above=0, titan="param_init of every module")
    """Standard deviation of the initial weights; outputs into the residual stream get it divided
    by the root of twice num_layers."""

    attention_backend: Literal["auto", "flex", "varlen"] = option("auto", titan="inner_attention")
    """Attention kernel: flex (FlexAttention), varlen (packed flash attention, no context
    parallelism). auto: flex."""

    moe: MoEConfig = option()
    """The mixture of experts."""

    longrope: LongRopeConfig = section(LongRopeConfig)
    """Stretched rotary embeddings, for phimoe."""

    mla: MLAConfig = section(MLAConfig)
    """Latent attention, for mla_moe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The training loss."""

    name: Literal["cross_entropy", "chunked_cross_entropy"] = option(
        "cross_entropy", titan="loss (the loss's class)"
    )
    """chunked_cross_entropy computes logits for a part of the sequence at a time, so that the
    whole [tokens, vocab_size] matrix never exists."""

    num_chunks: int | Literal["auto"] = option(
        "auto",
        at_least=1,
        titan="ChunkedCELoss.Config.num_chunks",
        needs='name = "chunked_cross_entropy"',
        request=True,
    )
    """Parts of the sequence for chunked_cross_entropy. auto: as few as max_chunk_mib allows."""

    max_chunk_mib: float = option(
        512.0, above=0, titan="", needs='num_chunks = "auto"', request=True
    )
    """For num_chunks = "auto": MiB that the logits of one part may take, copies and gradients
    included."""
