"""Degrees, sequences, batches and pipelines that cannot be laid out, with their messages."""

from tests.config.wrong import Wrong

DEGREES = [
    Wrong(
        "ep does not divide the ranks",
        "command line: --parallelism.expert_parallel_degree = 3: must divide dp_shard * cp "
        "* tp = 4 * 2 * 1 = 8 and model.moe.num_experts = 16; use 1, 2, 4 or 8",
        argv=(
            "--parallelism.data_parallel_shard_degree=4",
            "--parallelism.context_parallel_degree=2",
            "--parallelism.expert_parallel_degree=3",
        ),
        ranks=8,
    ),
    Wrong(
        "ep does not divide the experts",
        "case.toml: parallelism.expert_parallel_degree = 4: must divide "
        "model.moe.num_experts = 10; use 1 or 2, or 8 or 12 experts",
        toml="[model.moe]\nnum_experts = 10\n[parallelism]\nexpert_parallel_degree = 4",
        ranks=4,
    ),
    Wrong(
        "sequence not divisible by 2 * cp",
        "case.toml: training.seq_len = 2999: must be a multiple of 2 * cp = 2 * 4 = 8; use "
        "2992 or 3000",
        toml="[training]\nseq_len = 2999\n[parallelism]\ncontext_parallel_degree = 4",
        ranks=4,
    ),
    Wrong(
        "sequence not divisible by blocks",
        "good.toml: training.seq_len = 128: must be a multiple of 2 * cp = 2 * 2 = 4 and "
        'of 128 * cp = 256 (load balancer "ptrr"); use 256',
        toml='[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"',
        ranks=2,
    ),
    Wrong(
        "sequence not divisible by tp",
        "case.toml: training.seq_len = 127: must be a multiple of tp = 2; use 126 or 128",
        toml="[training]\nseq_len = 127\n[parallelism]\ntensor_parallel_degree = 2",
        ranks=2,
    ),
    Wrong(
        "fewer tokens for the relay than a microbatch has",
        "case.toml: relay.max_tokens_per_rank = 63: must be at least the tokens of a "
        "microbatch on a rank, 256; use that, or leave it out",
        toml="[relay]\nmax_tokens_per_rank = 63",
    ),
    Wrong(
        "degrees give too few ranks",
        "case.toml: parallelism.data_parallel_shard_degree = 2: dp_replicate 1 * dp_shard "
        "2 * cp 1 * tp 1 * pp 1 = 2, but there are 4 ranks; use 4 (or -1), or start 2 ranks",
        toml="[parallelism]\ndata_parallel_shard_degree = 2",
        ranks=4,
    ),
    Wrong(
        "degrees give too many ranks",
        "case.toml: parallelism.data_parallel_shard_degree = 2: dp_replicate 1 * dp_shard "
        "2 * cp 4 * tp 1 * pp 1 = 8, but there are 4 ranks; use 1 (or -1), or start 8 ranks",
        toml="[parallelism]\ndata_parallel_shard_degree = 2\ncontext_parallel_degree = 4",
        ranks=4,
    ),
    Wrong(
        "ep counted as ranks",
        "case.toml: parallelism.data_parallel_shard_degree = 2: dp_replicate 1 * dp_shard "
        "2 * cp 1 * tp 1 * pp 1 = 2, but there are 4 ranks; use 4 (or -1), or start 2 "
        "ranks (expert_parallel_degree 2 is no factor: it reuses these ranks)",
        toml="[parallelism]\ndata_parallel_shard_degree = 2\nexpert_parallel_degree = 2",
        ranks=4,
    ),
    Wrong(
        "left-over degree does not come out",
        "case.toml: parallelism.context_parallel_degree = 3: dp_replicate 1 * cp 3 * tp 1 "
        "* pp 1 = 3 does not divide the 8 ranks; use 1, 2, 4 or 8, or start a multiple of "
        "3 ranks",
        toml="[parallelism]\ncontext_parallel_degree = 3",
        ranks=8,
    ),
    Wrong(
        "left-over degree with too few ranks",
        "case.toml: parallelism.data_parallel_replicate_degree = 2: dp_replicate 2 * cp 2 "
        "* tp 1 * pp 1 = 4 does not divide the 2 ranks; use 1, or start a multiple of 4 "
        "ranks",
        toml="[parallelism]\ndata_parallel_replicate_degree = 2\ncontext_parallel_degree = 2",
        ranks=2,
    ),
    Wrong(
        "heads not divisible by tp",
        "case.toml: parallelism.tensor_parallel_degree = 4: must divide model.num_heads = "
        "4 and model.num_kv_heads = 2; use 1 or 2",
        toml="[parallelism]\ntensor_parallel_degree = 4",
        ranks=4,
    ),
    Wrong(
        "batch that does not divide",
        "case.toml: training.global_batch_size = 10: must be a multiple of "
        "local_batch_size * dp_replicate * dp_shard = 2 * 1 * 4 = 8; use 8 or 16",
        toml="[training]\nglobal_batch_size = 10",
        ranks=4,
    ),
    Wrong(
        "varlen with context parallelism",
        'case.toml: model.attention_backend = "varlen": cannot be split over '
        'context_parallel_degree = 2 ranks; use "flex", or context_parallel_degree = 1',
        toml='[model]\nattention_backend = "varlen"\n[parallelism]\ncontext_parallel_degree = 2',
        ranks=2,
    ),
    Wrong(
        "sequence longer than the model",
        "case.toml: training.seq_len = 8192: must be at most model.max_seq_len = 4096; use "
        "4096 or less, or raise it",
        toml="[training]\nseq_len = 8192",
    ),
    Wrong(
        "chunks that do not divide",
        "case.toml: loss.num_chunks = 8: must divide seq_len / cp = 100 / 1 = 100; use 5 or 10",
        toml='[training]\nseq_len = 100\n[loss]\nname = "chunked_cross_entropy"\nnum_chunks = 8',
    ),
]

_TP = ("--parallelism.tensor_parallel_degree=2",)
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _scheduled(schedule: str) -> tuple[str, ...]:
    """Two stages of a layer on each of two ranks."""
    return (
        "--parallelism.pipeline_parallel_degree=2",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--parallelism.pipeline_parallel_first_stage_less_layers=0",
        "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    )


PAIRS = [
    *(
        Wrong(
            f"validation with {schedule}",
            "command line: --validator.enable = true: parallelism.pipeline_parallel_schedule = "
            f'"{schedule}" cannot validate; use false, or another schedule',
            argv=(
                "--validator.enable",
                *_scheduled(schedule),
            ),
            ranks=2,
        )
        for schedule in ("ZBVZeroBubble", "DualPipeV")
    ),
    *(
        Wrong(
            f"compiled {part} with {schedule}",
            "command line: --compile.enable = true: nothing can be compiled with "
            f'parallelism.pipeline_parallel_schedule = "{schedule}", which splits the backward; '
            "use false, or another schedule",
            argv=("--compile.enable", f"--compile.components={part}", *_scheduled(schedule)),
            ranks=2,
        )
        for schedule in _SPLIT_BACKWARD
        for part in ("model", "loss")
    ),
    *(
        Wrong(
            f"checkpointed activations with {schedule}",
            'command line: --activation_checkpoint.mode = "full": nothing can be computed again '
            f'with parallelism.pipeline_parallel_schedule = "{schedule}", which splits the '
            "backward; "
            'use "none", another schedule, or relay.dispatcher = "relay"',
            argv=(
                "--relay.dispatcher=alltoall",
                "--activation_checkpoint.mode=full",
                *_scheduled(schedule),
            ),
            ranks=2,
        )
        for schedule in _SPLIT_BACKWARD
    ),
    Wrong(
        "a model compiled over tensor-parallel ranks",
        'case.toml: compile.components = ["model", "loss"] (default): the model cannot be compiled '
        'with parallelism.tensor_parallel_degree = 2; use ["loss"], or compile.enable = false',
        argv=("--compile.enable", *_TP),
        ranks=2,
    ),
    Wrong(
        "experts split over whole sequences of tensor-parallel ranks",
        "command line: --parallelism.enable_sequence_parallel = false: experts cannot be split "
        "(parallelism.expert_parallel_degree = 2) over whole sequences of "
        "parallelism.tensor_parallel_degree = 2 ranks; use true",
        argv=(
            "--parallelism.enable_sequence_parallel=false",
            "--parallelism.expert_parallel_degree=2",
            *_TP,
        ),
        ranks=4,
    ),
]

PIPELINES = [
    Wrong(
        "tied weights in a pipeline",
        "case.toml: model.tie_word_embeddings = true: embedding and output head are on "
        "different pipeline stages; use false, or parallelism.pipeline_parallel_degree = 1",
        toml="[model]\ntie_word_embeddings = true\n[parallelism]\npipeline_parallel_degree = 2",
        ranks=2,
    ),
    Wrong(
        "microbatch that does not divide",
        "case.toml: parallelism.pipeline_parallel_microbatch_size = 3: must divide "
        "training.local_batch_size = 2; use 1 or 2",
        toml="[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3",
        ranks=2,
    ),
    Wrong(
        "more stages than layers",
        "good.toml: model.num_layers = 4: is too few for 8 pipeline stages (degree 8, "
        "schedule 1F1B); use 6 or more, or a lower parallelism.pipeline_parallel_degree",
        toml="[parallelism]\npipeline_parallel_degree = 8",
        ranks=8,
    ),
    Wrong(
        "first stage with too few layers",
        "case.toml: parallelism.pipeline_parallel_first_stage_less_layers = 9: must be at "
        "most the layers of a stage, (4 + 9 + 1) / 2 = 7; use 5 or less",
        toml=(
            "[parallelism]\npipeline_parallel_degree = 2\n"
            "pipeline_parallel_first_stage_less_layers = 9"
        ),
        ranks=2,
    ),
    Wrong(
        "layers per stage that do not fit",
        "case.toml: parallelism.pipeline_parallel_layers_per_stage = 1: is 6 stages for 2 "
        "ranks, but 1F1B needs 1 per rank; use 3, 4 or none",
        toml="[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 1",
        ranks=2,
    ),
    Wrong(
        "module lists that do not fit",
        'case.toml: parallelism.module_fqns_per_model_part = [["tok_embeddings"], '
        '["lm_head"]]: is 2 stages for 2 ranks, but Interleaved1F1B needs 2 or more per '
        "rank; give 4 or 6 or more lists",
        toml=(
            "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "
            '"Interleaved1F1B"\nmodule_fqns_per_model_part = [["tok_embeddings"], '
            '["lm_head"]]'
        ),
        ranks=2,
    ),
    *(
        Wrong(
            f"module lists that {fault}",
            f"case.toml: parallelism.module_fqns_per_model_part = {lists}: {fault}; spread "
            "tok_embeddings, layers.0 to layers.3, norm, lm_head over the lists, in this order",
            toml=(
                f"[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = {lists}"
            ),
            ranks=2,
        )
        for fault, lists in (
            ("names a, which the model does not have", '[["a"], ["b"]]'),
            ("leaves out layers.0", '[["tok_embeddings"], ["norm", "lm_head"]]'),
            (
                "names modules twice or out of order",
                '[["layers.0", "layers.1", "layers.2", "layers.3", "norm", "lm_head"], '
                '["tok_embeddings"]]',
            ),
        )
    ),
]
