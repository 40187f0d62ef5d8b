"""Tokenizer files as models ship them: `tokenizer.json`, or a tiktoken rank file with special
tokens named beside it."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from tests.data.support import write_byte_ranks
from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data import DataError, load_tokenizer
from titan_relay.data.splitting import PATTERNS

TEXTS = [
    "def f(x):\n\treturn x ** 2  # naïve\n",
    "  The 1,234 quick brown foxes' 日本語 😀 \r\n\n",
    "",
    "<|im_start|>user says <|endoftext|>",
]


def ship_rank_file(folder: Path, name: str) -> Path:
    """A folder with a rank file and its special tokens in `tokenizer_config.json`."""
    folder.mkdir()
    write_byte_ranks(folder / name, merges=[b"th", b"the", b" the"])
    added = {
        "260": {"content": "<|begin|>", "special": True},
        "265": {"content": "<|end|>", "special": True},
    }
    content = {
        "added_tokens_decoder": added,
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model", "tokenizer.model"])
def test_a_folder_with_a_rank_file(tmp_path: Path, name: str) -> None:
    folder = ship_rank_file(tmp_path / "Model-K2.5", name)
    tokenizer = load_tokenizer(TokenizerConfig(path=str(folder), add_bos=True))
    assert tokenizer.encode("the") == [260, 257, 265]
    assert tokenizer.encode("<|end|>")[1:-1] == list(b"<|end|>")  # text about a token is text
    assert tokenizer.vocab_size == 266  # highest id plus one, gaps included
    # The configuration adds to the file beside it, and counts more.
    own = TokenizerConfig(path=str(folder), special_tokens={"<|x|>": 300}, eos_token="<|x|>")
    assert load_tokenizer(own).encode("a") == [97, 300]


def test_a_folder_without_one_rank_file_is_refused(tmp_path: Path) -> None:
    folder = ship_rank_file(tmp_path / "two", "a.tiktoken")
    write_byte_ranks(folder / "b.tiktoken")
    with pytest.raises(DataError, match=r"a\.tiktoken and b\.tiktoken; name one of the files"):
        load_tokenizer(TokenizerConfig(path=str(folder)))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="has no tiktoken rank file; name one, or use kind"):
        load_tokenizer(TokenizerConfig(path=str(tmp_path / "none")))


def test_tokenizer_json_gives_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    trained = RustTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS["qwen2"]), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 5, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    options = {"kind": "huggingface", "path": str(tmp_path), "add_eos": False}
    ours = load_tokenizer(TokenizerConfig(**options, allow_special_in_text=True))
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.vocab_size == len(theirs)
    assert ours.eos_id == theirs.eos_token_id
