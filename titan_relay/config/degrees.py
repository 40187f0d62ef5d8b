"""The parallel degrees of a run, with the left-over degree filled in, and their arithmetic."""

import math
from dataclasses import dataclass, replace

from titan_relay.config.schema import RunConfig
from titan_relay.units import MIB

# A logit's copies at the peak: the product, float32, its log-softmax, and the gradients of the
# latter two.
_BYTES_PER_LOGIT = 20


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis. ep is no factor of the world: it reuses dp_shard, cp and tp."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int

    @property
    def world(self) -> int:
        """Ranks that these degrees need."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_region(self) -> int:
        """Ranks that expert parallelism may reuse."""
        return self.dp_shard * self.cp * self.tp


def degrees_of(config: RunConfig, world_size: int) -> Degrees:
    """The degrees of `config` on `world_size` ranks.

    A shard degree of -1 becomes what the others leave over, at least 1. Whether the product is
    `world_size` is for `validate` to say.
    """
    asked = config.parallelism
    degrees = Degrees(
        dp_replicate=asked.data_parallel_replicate_degree,
        dp_shard=1,
        cp=asked.context_parallel_degree,
        tp=asked.tensor_parallel_degree,
        pp=asked.pipeline_parallel_degree,
        ep=asked.expert_parallel_degree,
    )
    shard = asked.data_parallel_shard_degree
    left_over = max(1, world_size // degrees.world)
    return replace(degrees, dp_shard=left_over if shard == -1 else shard)


def global_batch_size(config: RunConfig, world_size: int) -> int:
    """Sequences per optimizer step over all ranks."""
    if config.training.global_batch_size > 0:
        return config.training.global_batch_size
    return config.training.local_batch_size * degrees_of(config, world_size).batch


def microbatch_rows(config: RunConfig, degrees: Degrees) -> int:
    """Sequences that a rank computes at a time."""
    if degrees.pp > 1:
        return config.parallelism.pipeline_parallel_microbatch_size
    return config.training.local_batch_size


def microbatch_tokens(config: RunConfig, degrees: Degrees) -> int:
    """Tokens of one microbatch that a rank's MoE layers see.

    TP ranks share them out only where they take part in expert parallelism.
    """
    parts = degrees.cp * (degrees.tp if degrees.ep > 1 else 1)
    return microbatch_rows(config, degrees) * config.training.seq_len // parts


def loss_chunks(config: RunConfig, degrees: Degrees) -> int:
    """`loss.num_chunks`, with "auto" filled in: the fewest whose logits fit loss.max_chunk_mib.

    Never more than a rank's tokens of a sequence, and always a divisor of these.
    """
    if config.loss.num_chunks != "auto":
        return config.loss.num_chunks
    local_len = config.training.seq_len // degrees.cp
    num_logits = microbatch_rows(config, degrees) * local_len * config.model.vocab_size
    chunk_bytes = num_logits // degrees.tp * _BYTES_PER_LOGIT
    limit_bytes = config.loss.max_chunk_mib * MIB
    fitting = (each for each in divisors(local_len) if chunk_bytes / each <= limit_bytes)
    return next(fitting, local_len)


def sequence_multiple(config: RunConfig, degrees: Degrees) -> tuple[int, str]:
    """What training.seq_len must be a multiple of, and the reason in words.

    Context parallelism deals out two pieces per rank; the document-mask balancer deals out
    whole attention blocks of 128; sequence parallelism splits each piece over tp.
    """
    tp = degrees.tp if config.parallelism.enable_sequence_parallel else 1
    halves = 2 * degrees.cp if degrees.cp > 1 else 1
    factors = {"2 * cp": f"2 * {degrees.cp}"} if degrees.cp > 1 else {}
    if tp > 1:
        factors["tp"] = str(tp)
    unit, reason = halves * tp, f"{' * '.join(factors)} = {' * '.join(factors.values())}"
    reason += f" = {unit}" if degrees.cp > 1 else ""
    if degrees.cp > 1 and config.parallelism.context_parallel_load_balancer == "ptrr":
        blocks = 128 * degrees.cp
        reason += f' and of 128 * cp = {blocks} (load balancer "ptrr")'
        unit = math.lcm(unit, blocks)
    return unit, reason


def multiples_near(value: int, unit: int) -> list[int]:
    """The multiples of `unit` just below and just above `value`, from `unit` on."""
    below = value // unit * unit
    return [each for each in (below, below + unit) if each > 0]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def nearest_few(value: int, legal: list[int], count: int = 6) -> list[int]:
    """The `count` legal numbers nearest to `value`, ascending."""
    return sorted(sorted(legal, key=lambda each: (abs(each - value), each))[:count])
