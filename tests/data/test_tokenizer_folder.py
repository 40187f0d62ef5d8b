"""Tokenizer files as models ship them: `tokenizer.json`, or a tiktoken rank file with special
tokens named beside it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
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


ABC = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}


def ship_json(folder: Path, added: Iterable[AddedToken] = (), **named: Any) -> TokenizerConfig:
    """A tokenizer.json of two letters, two special tokens and `added`, and what `named` says."""
    tokenizer = RustTokenizer(models.BPE(vocab=ABC, merges=[]))
    tokenizer.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens(list(added))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return TokenizerConfig(kind="huggingface", path=str(folder), eos_token="</s>")


@pytest.mark.parametrize(
    "named",
    [
        {"bos_token": "<bos>"},
        {"bos_token": {"content": "<bos>"}, "pad_token": "<pad>", "unk_token": "<unk>"},
        {"bos_token": False, "eos_token": "<eos>", "additional_special_tokens": ["<x>"]},
        {"bos_token": "", "mask_token": "<mask>"},
    ],
    ids=["bos", "pad and unk", "the folder's eos beside the run's", "empty"],
)
def test_special_tokens_that_the_run_does_not_use_need_not_be_there(
    named: dict[str, Any], tmp_path: Path
) -> None:
    config = ship_json(tmp_path / "hf", **named)
    tokenizer = load_tokenizer(config)
    assert tokenizer.encode("ab") == [0, 1, 3]
    assert tokenizer.bos_id is None
    assert load_tokenizer(replace(config, eos_token=None, add_eos=False)).encode("ab") == [0, 1]


def test_a_special_token_that_the_run_uses_must_be_there(tmp_path: Path) -> None:
    config = ship_json(tmp_path / "hf", bos_token="<bos>", eos_token="<eos>")
    for wanted, message in (
        ({"add_bos": True}, r'add_bos = true, but "<bos>", .* own, is not in .*set tokenizer.bos_'),
        ({"eos_token": None}, r'add_eos = true, but "<eos>", .*or tokenizer.add_eos = false'),
        ({"bos_token": "<b>"}, r'tokenizer.bos_token = "<b>" is not in'),  # a key says so itself
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(replace(config, **wanted))


def test_only_tokens_that_a_row_can_hold_ask_for_rows_of_the_embedding(tmp_path: Path) -> None:
    pad = AddedToken("[PAD]", special=True)
    config = ship_json(tmp_path / "hf", [pad], pad_token="[PAD]", bos_token="[PAD]")
    assert load_tokenizer(config).vocab_size == 4
    assert load_tokenizer(replace(config, add_bos=True)).vocab_size == 5
    assert load_tokenizer(replace(config, eos_token="[PAD]")).vocab_size == 5
    text = replace(config, allow_special_in_text=True)
    assert load_tokenizer(text).vocab_size == 5
    assert load_tokenizer(text).encode("a[PAD]") == [0, 4, 3]
    # One that is not special is found in any text.
    found = load_tokenizer(ship_json(tmp_path / "plain", [AddedToken("ab", special=False)]))
    assert (found.vocab_size, found.encode("ab")) == (5, [4, 3])


def test_special_tokens_beside_a_rank_file_that_it_has_no_place_for(tmp_path: Path) -> None:
    folder = ship_rank_file(tmp_path / "model", "a.tiktoken")
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["added_tokens_decoder"] |= {"7": {"content": "<unk>"}, "9000": {"content": "<pad>"}}
    file.write_text(json.dumps(content))
    config = TokenizerConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    assert (tokenizer.encode("a"), tokenizer.vocab_size) == ([97, 265], 266)
    with pytest.raises(DataError, match='"<unk>" = 7 is taken'):
        load_tokenizer(replace(config, allow_special_in_text=True))
    file.write_text(json.dumps(content | {"eos_token": "<unk>"}))
    with pytest.raises(DataError, match='add_eos = true, but "<unk>", the folder'):
        load_tokenizer(config)
    file.write_text('{"added_tokens_decoder": {"a": {}}}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: added_tokens_decoder is not"):
        load_tokenizer(config)


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
