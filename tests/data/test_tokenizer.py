"""Ids are exactly what the configuration says: BOS, EOS, specials in text, long texts."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from tests.data.support import EOS, byte_tokenizer, write_byte_ranks
from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data import DataError, load_tokenizer

BOS_ID, EOS_ID = 256, 257
MARKER = "<|endoftext|>"


def write_hf(
    folder: Path, *, template: str = "", shared: bool = False, special: bool = True
) -> Path:
    """A tokenizer.json of single bytes with <s> = 256 and, unless shared, </s> = 257."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    names = ["<s>"] if shared else ["<s>", "</s>"]
    vocab |= {name: BOS_ID + index for index, name in enumerate(names)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([AddedToken(name, special=special) for name in names])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(name, vocab[name]) for name in names]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": names[-1]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def hf(folder: Path, **options: Any) -> TokenizerConfig:
    return TokenizerConfig(kind="huggingface", path=str(folder), **options)


@pytest.mark.parametrize("template", ["", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_bos_and_eos_once_each_whatever_the_template_does(
    tmp_path: Path, template: str, add_bos: bool, add_eos: bool
) -> None:
    folder = write_hf(tmp_path / "hf", template=template)
    tokenizer = load_tokenizer(hf(folder, add_bos=add_bos, add_eos=add_eos))
    body = [64, 65]  # "ab" in this file's order of letters
    expected = [BOS_ID] * add_bos + body + [EOS_ID] * add_eos
    assert tokenizer.encode("ab") == expected
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (BOS_ID, EOS_ID, 258)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_a_token_that_is_both_bos_and_eos_is_added_at_both_ends(
    tmp_path: Path, add_bos: bool, add_eos: bool
) -> None:
    folder = write_hf(tmp_path / "hf", template="<s> $A", shared=True)
    tokenizer = load_tokenizer(hf(folder, add_bos=add_bos, add_eos=add_eos))
    assert tokenizer.encode("ab") == [BOS_ID] * add_bos + [64, 65] + [BOS_ID] * add_eos
    assert tokenizer.encode("") == [BOS_ID] * add_bos + [BOS_ID] * add_eos


@pytest.mark.parametrize("special", [True, False])
def test_spelling_of_a_special_token_in_hf_text_is_text(tmp_path: Path, special: bool) -> None:
    folder = write_hf(tmp_path / "hf", special=special)
    ids = load_tokenizer(hf(folder, add_bos=True)).encode("a</s>b<s>c")
    assert ids.count(EOS_ID) == 1
    assert ids.count(BOS_ID) == 1
    allowed = load_tokenizer(hf(folder, allow_special_in_text=True)).encode("a</s>b")
    assert allowed == [64, EOS_ID, 65, EOS_ID]


def test_spelling_of_a_special_token_in_tiktoken_text_is_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.encode(MARKER) == [*MARKER.encode(), EOS]
    assert tokenizer.decode(tokenizer.encode(MARKER)) == MARKER * 2
    allowed = byte_tokenizer(tmp_path, allow_special_in_text=True)
    assert allowed.encode(f"a{MARKER}b") == [97, EOS, 98, EOS]


def test_an_eos_that_the_text_supplies_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, allow_special_in_text=True, bos_token=MARKER, add_bos=True)
    assert tokenizer.encode(f"a{MARKER}") == [EOS, 97, EOS]
    assert tokenizer.encode(f"{MARKER}a") == [EOS, 97, EOS]
    assert tokenizer.encode(MARKER) == [EOS, EOS]


def test_tiktoken_merges_by_rank(tmp_path: Path) -> None:
    path = write_byte_ranks(tmp_path / "ranks", merges=[b"ab", b"abc"])
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path), add_eos=False))
    assert tokenizer.encode("abcab") == [257, 256]
    assert tokenizer.vocab_size == 258
    assert tokenizer.eos_id is None


@pytest.mark.parametrize("unit", ["a", " ", "\n", "é", "1", ".", "ab "])
def test_a_five_megabyte_line_takes_bounded_time(tmp_path: Path, unit: str) -> None:
    """tiktoken alone panics on a million blanks, and merges one huge piece slowly."""
    path = write_byte_ranks(tmp_path / "ranks", merges=[b"aa", b"  ", b"aaaa", b"    "])
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path), add_eos=False))
    text = unit * (5_000_000 // len(unit.encode()))
    started = time.monotonic()
    ids = tokenizer.encode(text)
    assert time.monotonic() - started < 30  # about 1 s on one core
    assert tokenizer.decode(ids) == text


def test_long_runs_in_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(hf(write_hf(tmp_path / "hf"), add_eos=False))
    assert len(tokenizer.encode(" " * 300_000 + "x")) == 300_001


def test_a_truncation_setting_in_the_file_does_not_cut_documents(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf")
    saved = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(max_length=2)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(hf(folder, add_eos=False)).encode("abcde")) == 5


def test_fingerprint_follows_what_ids_depend_on(tmp_path: Path) -> None:
    plain = byte_tokenizer(tmp_path).fingerprint
    assert byte_tokenizer(tmp_path).fingerprint == plain
    assert byte_tokenizer(tmp_path, add_eos=False).fingerprint != plain
    assert byte_tokenizer(tmp_path, pattern="gpt2").fingerprint != plain
    assert byte_tokenizer(tmp_path, allow_special_in_text=True).fingerprint != plain


def test_a_rank_file_written_again_is_read_again(tmp_path: Path) -> None:
    path = write_byte_ranks(tmp_path / "ranks")
    config = TokenizerConfig(path=str(path), add_eos=False)
    assert load_tokenizer(config).encode("ab") == [97, 98]
    write_byte_ranks(path, merges=[b"ab"])
    assert load_tokenizer(config).encode("ab") == [256]


def test_errors_name_key_value_and_fix(tmp_path: Path) -> None:
    ranks = str(write_byte_ranks(tmp_path / "ranks"))
    broken = tmp_path / "broken"
    broken.write_text("YQ== 0\nnot a rank\n")
    partial = tmp_path / "partial"
    partial.write_text("YQ== 0\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.bin").write_text("")
    (tmp_path / "bad.json").write_text("{")
    cases = [
        (TokenizerConfig(), "tokenizer.path is empty"),
        (TokenizerConfig(path="nowhere"), '"nowhere": no such file or folder in '),
        (TokenizerConfig(path=str(broken)), "broken, line 2: "),
        (TokenizerConfig(path=str(partial)), "255 of the 256 single bytes have no rank"),
        (TokenizerConfig(path=ranks), "add_eos = true, but no eos token is known"),
        (TokenizerConfig(path=ranks, eos_token="</s>"), 'eos_token = "</s>" is not in'),
        (TokenizerConfig(path=ranks, special_tokens={"<e>": 7}), "from 256 on are free"),
        (TokenizerConfig(path=ranks, pattern="qwen22", add_eos=False), "is not a known pattern"),
        (TokenizerConfig(path=ranks, pattern="(a", add_eos=False), "not a valid regular"),
        (hf(tmp_path / "empty"), "has no tokenizer.json; it has: nothing"),
        (hf(tmp_path / "other"), "it has: vocab.bin"),
        (hf(tmp_path / "missing"), "no such file or folder in "),
        (hf(tmp_path / "bad.json"), "is not a tokenizer.json"),
        (hf(write_hf(tmp_path / "hf"), special_tokens={"<s>": 5}), "leave the key out"),
    ]
    for config, message in cases:
        with pytest.raises(DataError) as caught:
            load_tokenizer(config)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
