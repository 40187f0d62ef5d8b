"""How many parts of the sequence the chunked loss computes one after another."""

from titan_relay.config.degrees import Degrees, divisors
from titan_relay.config.schema import RunConfig

# A logit's copies at the peak: the product, float32, its log-softmax, and the gradients of the
# latter two.
_BYTES_PER_LOGIT = 20
_MIB = 2**20


def loss_chunks(config: RunConfig, degrees: Degrees) -> int:
    """`loss.num_chunks`, with "auto" filled in: the fewest whose logits fit loss.max_chunk_mib.

    Never more than a rank's tokens of a sequence, and always a divisor of these.
    """
    if config.loss.num_chunks != "auto":
        return config.loss.num_chunks
    rows = (
        config.parallelism.pipeline_parallel_microbatch_size
        if degrees.pp > 1
        else config.training.local_batch_size
    )
    local_len = config.training.seq_len // degrees.cp
    chunk_bytes = rows * local_len * config.model.vocab_size // degrees.tp * _BYTES_PER_LOGIT
    limit_bytes = config.loss.max_chunk_mib * _MIB
    fitting = (each for each in divisors(local_len) if chunk_bytes / each <= limit_bytes)
    return next(fitting, local_len)
