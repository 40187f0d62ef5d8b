"""Long runs: whatever a document is made of, it gets the ids that its tokenizer gives the whole of
it, in time that grows as the text does."""

import random
import time
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.data.support import write_byte_ranks
from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data import load_tokenizer
from titan_relay.data.splitting import MAX_BLANK_CHARS, PATTERNS, cut_long_runs
from titan_relay.data.tokenizer_files import read_rank_file

_draw = random.Random(0)
_CJK = "".join(_draw.choices("日本語文章中国人大学生活電車東京", k=1_000))
RUNS = {
    "CJK": _CJK * 50,
    "blanks": "a" + " " * 50_000 + "b",
    "ideographic blanks": "\u3000" * 50_000,
    "digits": "1234567890" * 5_000,
    "an address": "http://www.ab.de/fgh?ijk=" * 2_000,
    "lines": "\n" * 30_000 + "x" + " \t" * 15_000,
    "emoji": "😀" * 30_000,
}
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _byte_level(tokenizer: Tokenizer) -> trainers.Trainer:
    split = pre_tokenizers.Split(Regex(PATTERNS["qwen2"]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)


def _prefixed_byte_level(tokenizer: Tokenizer) -> trainers.Trainer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)


def _metaspace(tokenizer: Tokenizer) -> trainers.Trainer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)


def _prepend(tokenizer: Tokenizer) -> trainers.Trainer:
    """As SentencePiece models are converted: a normalizer puts the blank there."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Replace("▁", " ")
    return trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)


def _strip(tokenizer: Tokenizer) -> trainers.Trainer:
    """A normalizer that looks at the start of a text."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex("^"), "▁")]
    )
    return trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)


KINDS = {
    "byte level": _byte_level,
    "byte level with a prefix": _prefixed_byte_level,
    "Metaspace": _metaspace,
    "prepended": _prepend,
    "stripped": _strip,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer.json of each kind."""
    found = {}
    texts = [_CJK[at : at + 50] for at in range(0, 1_000, 50)] + [
        "see http://www.ab.de 123 4567"
    ] * 9
    for name, build in KINDS.items():
        tokenizer = Tokenizer(models.BPE(unk_token=None if "byte" in name else "<unk>"))
        tokenizer.train_from_iterator(texts, build(tokenizer))
        found[name] = tmp_path_factory.mktemp("kind")
        tokenizer.save(str(found[name] / "tokenizer.json"))
    return found


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_run_gets_the_ids_of_the_whole(
    kind: str, run: str, folders: dict[str, Path]
) -> None:
    path = folders[kind]
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(path), add_eos=False))
    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = RUNS[run]
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "o200k", "qwen2"])
def test_a_long_run_gets_the_ids_of_tiktoken(pattern: str, run: str, tmp_path: Path) -> None:
    merges = [b"  ", b"11", "日".encode()[:2], "日".encode(), b"    ", b"12", b"123", b"\n\n"]
    path = write_byte_ranks(tmp_path / "ranks", merges=merges)
    settings = TokenizerConfig(path=str(path), pattern=pattern, add_eos=False)
    ranks = read_rank_file(path)
    whole = tiktoken.Encoding(
        "whole", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )
    assert load_tokenizer(settings).encode(RUNS[run]) == whole.encode_ordinary(RUNS[run])


@pytest.mark.parametrize("run", ["CJK", "blanks", "digits"])
@pytest.mark.parametrize("kind", ["byte level", "Metaspace", "tiktoken"])
def test_eight_times_the_run_takes_no_more_than_four_times_its_share(
    kind: str, run: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Quadratic time would be eight times its share; what is measured is once to twice."""
    settings = TokenizerConfig(path=str(write_byte_ranks(tmp_path / "ranks")), add_eos=False)
    if kind != "tiktoken":
        settings = TokenizerConfig(kind="huggingface", path=str(folders[kind]), add_eos=False)
    tokenizer = load_tokenizer(settings)

    def seconds(text: str) -> float:
        started = time.process_time()
        tokenizer.encode(text)
        return time.process_time() - started

    text = RUNS[run][:20_000]
    ratio = min(seconds(text * 8) / (8 * seconds(text)) for _ in range(2))
    assert ratio < 4


def test_a_million_blanks_are_cut_for_tiktoken_alone(tmp_path: Path) -> None:
    """tiktoken fails on them; half of that is its own."""
    path = write_byte_ranks(tmp_path / "ranks", merges=[b"  ", b"   "])
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path), add_eos=False))
    assert tokenizer.decode(tokenizer.encode(" " * 2_000_001 + "x")) == " " * 2_000_001 + "x"
    text = "x" * 3 * MAX_BLANK_CHARS
    assert cut_long_runs(text, MAX_BLANK_CHARS, blanks_only=True) == [text]


@given(st.text(alphabet="ab \n\u2003é", max_size=60), st.integers(1, 8))
def test_pieces_join_to_the_text_and_runs_are_short(text: str, limit: int) -> None:
    pieces = cut_long_runs(text, limit)
    assert "".join(pieces) == text
    for piece in pieces:
        run = 0
        for index, letter in enumerate(piece):
            same = index > 0 and letter.isspace() == piece[index - 1].isspace()
            run = run + 1 if same else 1
            assert run <= limit


def test_text_of_short_runs_is_not_cut() -> None:
    text = "word " * 100
    assert cut_long_runs(text, max_run_chars=5) == [text]
    assert cut_long_runs("ab  cdefgh", max_run_chars=3) == ["ab  cde", "fgh"]
    assert cut_long_runs("ab    cdefgh", 3, blanks_only=True) == ["ab   ", " cdefgh"]
