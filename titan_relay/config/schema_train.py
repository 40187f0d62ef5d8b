"""Keys of how a model is trained: batch, precision, parallelism, optimizer, schedule, recompute.

Names and defaults are torchtitan's where torchtitan has the key. Fields are documented by the
string below them, which is what ``--help`` and ``docs/config.md`` print.
"""
# ruff: noqa: RUF009  (option() and section() return dataclass fields, not shared values)

from dataclasses import dataclass
from typing import Literal

from titan_relay.config.fields import option

_PIPELINE = "pipeline_parallel_degree > 1"
_RECOMPUTES = tuple(f'mode = "{mode}"' for mode in ("selective", "full", "memory_budget"))
ParamDType = Literal["float32", "bfloat16"]
PipelineSchedule = Literal[
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batch, sequence, number of steps, precision."""

    local_batch_size: int = option(8, at_least=1)
    """Sequences that one data-parallel rank computes at a time. With pipeline parallelism this
    is what gets split into microbatches."""

    global_batch_size: int = option(-1, at_least=1, also=(-1,))
    """Sequences per optimizer step over all ranks; gradients accumulate until they are reached.
    -1: local_batch_size times the data-parallel degree, so no accumulation."""

    seq_len: int = option(2048, at_least=1)
    """Tokens per sequence; documents are packed into sequences of this length."""

    max_norm: float = option(1.0, above=0)
    """Gradients are scaled down so that their total norm is at most this."""

    max_skipped_steps: int = option(0, at_least=0, titan="")
    """Steps of the whole run, all restarts together, that may be left out because the loss, the
    gradient or a router's logits are NaN or infinite: weights, optimizer and balancing biases stay
    as they are. One more ends the run before its weights change, on all ranks."""

    steps: int = option(10000, at_least=1)
    """Optimizer steps of the whole run, counted from step 1 over all restarts."""

    enable_cpu_offload: bool = option(False)
    """Keep parameters, gradients and optimizer states in host memory (FSDP's offloading)."""

    max_minutes: float = option(0.0, at_least=0, titan="")
    """Time after which the run ends at the next step, saved as by a signal. 0: no limit."""

    dtype: ParamDType = option("float32")
    """Type in which parameters, their gradients and the optimizer states are stored."""

    mixed_precision_param: ParamDType = option("bfloat16")
    """Type in which FSDP gathers parameters and layers compute. On CPU it is always float32, which
    is faster there than emulated bfloat16."""

    mixed_precision_reduce: ParamDType = option("float32")
    """Type in which FSDP sums gradients over ranks."""

    gc_freq: int = option(50, at_least=1)
    """Steps between Python garbage collections, which run on all ranks at the same step."""

    gc_debug: bool = option(False)
    """Collect garbage at every step and report reference cycles that hold tensors."""

    cpu_threads_per_rank: int = option(0, at_least=0, titan="")
    """Threads that each rank computes with on CPU. 0: the cores divided by the local ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismConfig:
    """Degrees of each kind of parallelism.

    Their product without expert parallelism is the number of ranks.
    """

    data_parallel_replicate_degree: int = option(1, at_least=1)
    """Groups of ranks that each hold all the parameters (DDP, or HSDP with a shard degree)."""

    data_parallel_shard_degree: int = option(-1, at_least=1, also=(-1,))
    """Ranks over which FSDP shards parameters, gradients and optimizer states. -1: the ranks
    that the other degrees leave over."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = option("default")
    """Whether FSDP frees gathered parameters after forward: always, never, or default, which
    frees them unless pipeline parallelism would gather them for every microbatch."""

    tensor_parallel_degree: int = option(1, at_least=1)
    """Ranks over which each attention layer's heads are split."""

    enable_sequence_parallel: bool = option(True, needs="tensor_parallel_degree > 1")
    """With tensor parallelism, split the sequence over its ranks outside attention too."""

    pipeline_parallel_degree: int = option(1, at_least=1)
    """Ranks over which the layers are split; a rank may hold several stages."""

    pipeline_parallel_schedule: PipelineSchedule = option("1F1B", needs=_PIPELINE)
    """Order of the microbatches' forwards and backwards. 1F1B and GPipe have one stage per rank,
    the others two unless pipeline_parallel_layers_per_stage says otherwise."""

    pipeline_parallel_microbatch_size: int = option(1, at_least=1, needs=_PIPELINE)
    """Sequences per pipeline microbatch; divides training.local_batch_size."""

    pipeline_parallel_first_stage_less_layers: int = option(1, at_least=0, needs=_PIPELINE)
    """Layers fewer in the first stage, which also holds the embedding."""

    pipeline_parallel_last_stage_less_layers: int = option(1, at_least=0, needs=_PIPELINE)
    """Layers fewer in the last stage, which also holds the output head and the loss."""

    pipeline_parallel_layers_per_stage: int | None = option(None, at_least=1, needs=_PIPELINE)
    """Layers per pipeline stage; sets the number of stages. none: follows from the schedule."""

    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = option(
        None, not_empty=True, needs=_PIPELINE
    )
    """Modules of every pipeline stage by name, such as [["tok_embeddings", "layers.0"],
    ["layers.1", "norm", "lm_head"]]. none: an even split of the layers."""

    context_parallel_degree: int = option(1, at_least=1)
    """Ranks over which one sequence is split; keys and values are gathered for attention."""

    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = option(
        "headtail", needs="context_parallel_degree > 1"
    )
    """How the sequence is dealt out so that causal attention costs every rank the same: headtail
    (a piece from both ends), ptrr (by the document mask), none (in order)."""

    expert_parallel_degree: int = option(1, at_least=1)
    """Ranks over which the experts are split, that is the length of the ring. It reuses the
    ranks of dp_shard, cp and tp, so it does not multiply the number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer of all parameters."""

    name: Literal["Adam", "AdamW"] = option("AdamW", titan="optimizer.param_groups")
    """Adam adds weight decay to the gradient, AdamW applies it to the weights."""

    lr: float = option(8e-4, above=0, titan="optimizer.param_groups")
    """Learning rate after warm-up."""

    beta1: float = option(0.9, at_least=0, below=1, titan="optimizer.param_groups")
    """Decay of the running mean of gradients."""

    beta2: float = option(0.95, at_least=0, below=1, titan="optimizer.param_groups")
    """Decay of the running mean of squared gradients."""

    eps: float = option(1e-8, above=0, titan="optimizer.param_groups")
    """Added to the root of the running mean of squared gradients."""

    weight_decay: float = option(0.1, at_least=0, titan="optimizer.param_groups")
    """Weight decay per unit of learning rate."""

    implementation: Literal["for-loop", "foreach", "fused"] = option("fused")
    """for-loop: one tensor after another; foreach: many tensors a kernel; fused: one kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSchedulerConfig:
    """Warm-up, stable phase and decay of the learning rate."""

    warmup_steps: int = option(200, at_least=0)
    """Steps in which the learning rate rises linearly to optimizer.lr."""

    total_steps: int | None = option(None, at_least=1)
    """Steps over which the schedule is laid out. none: training.steps. Set it to stop early, or
    to go on later, on an unchanged curve."""

    decay_ratio: float | None = option(None, at_least=0, at_most=1)
    """Share of the steps, at the end, in which the learning rate decays; before that it is
    constant. none: it decays from the end of the warm-up on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = option("linear")
    """Shape of the decay."""

    min_lr_factor: float = option(0.0, at_least=0, at_most=1)
    """The decay ends at this share of optimizer.lr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointConfig:
    """What backward computes again, with the all-to-all.

    With relay.dispatcher = "relay" see [attention_retention] instead.
    """

    mode: Literal["none", "selective", "full", "memory_budget"] = option(
        "none", titan="activation_checkpoint (the policy's class)"
    )
    """none: keep all activations. selective: keep the costly operators' outputs. full: keep each
    block's input only. memory_budget: let torch.compile choose within memory_budget."""

    preserve_rng_state: bool = option(True, needs=_RECOMPUTES)
    """Restore the random-number state for the recomputation, as dropout needs."""

    determinism_check: Literal["default", "none"] = option("default", needs=_RECOMPUTES)
    """default: recomputed tensors must have the shapes, types and devices of the first ones."""

    debug: bool = option(False, needs=_RECOMPUTES)
    """Record every operator of a checkpointed block, for errors that say what differed. Slow."""

    memory_budget: float = option(0.5, at_least=0, at_most=1, needs='mode = "memory_budget"')
    """For mode = "memory_budget": 0 keeps as little as full, 1 keeps what is fastest."""

    visualize_memory_budget_pareto: bool = option(False, needs='mode = "memory_budget"')
    """For mode = "memory_budget": write a plot of time against memory to the dump folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = option(False)
    """Compile the components named below."""

    components: tuple[Literal["model", "loss"], ...] = option(("model", "loss"), not_empty=True)
    """What is compiled."""

    backend: str = option("inductor", not_empty=True)
    """The backend that torch.compile uses."""
