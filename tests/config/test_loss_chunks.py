"""The chunked loss's automatic number of chunks: few, within the limit, and a divisor."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.files import write_good
from titan_relay.config import degrees_of, load_config
from titan_relay.config.degrees import loss_chunks


@pytest.mark.parametrize(
    ("settings", "ranks", "chunks"),
    [
        # 2 rows of 128 tokens and 512 words take 2.5 MiB.
        ([], 1, 1),
        (["--loss.max_chunk_mib=2.5"], 1, 1),
        (["--loss.max_chunk_mib=2.4"], 1, 2),
        (["--loss.max_chunk_mib=0.5"], 1, 8),
        (["--loss.max_chunk_mib=0.001"], 1, 128),
        (["--training.seq_len=100", "--loss.max_chunk_mib=0.5"], 1, 4),
        (["--parallelism.context_parallel_degree=2", "--loss.max_chunk_mib=0.5"], 2, 4),
        (["--parallelism.tensor_parallel_degree=2", "--loss.max_chunk_mib=0.5"], 2, 4),
        # Under pipeline parallelism a microbatch of one row.
        (["--parallelism.pipeline_parallel_degree=2", "--loss.max_chunk_mib=0.5"], 2, 4),
        (["--loss.num_chunks=16"], 1, 16),
    ],
)
def test_number_of_chunks(settings, ranks, chunks, tmp_path: Path) -> None:
    config = load_config(["--config", str(write_good(tmp_path)), *settings]).config
    assert loss_chunks(config, degrees_of(config, ranks)) == chunks


def test_a_vocabulary_of_150_000_words_in_a_few_hundred_mib(tmp_path: Path) -> None:
    config = load_config(["--config", str(write_good(tmp_path))]).config
    config = replace(
        config,
        model=replace(config.model, vocab_size=151936),
        training=replace(config.training, seq_len=16384, local_batch_size=1),
    )
    assert loss_chunks(config, degrees_of(config, 1)) == 128  # 371 MiB a chunk
