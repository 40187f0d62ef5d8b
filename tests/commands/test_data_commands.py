"""`titan-relay corpus` and `tokenizer`: what they write, and that both kinds of id agree."""

import json
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from tests.data.support import byte_tokenizer
from titan_relay.cli import main
from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data import load_tokenizer
from titan_relay.data.bpe import byte_letters, train_bpe
from titan_relay.data.splitting import PATTERNS
from titan_relay.data.statistics import CorpusStatistics, corpus_statistics, unigram_entropy_nats
from titan_relay.data.tokenizer_files import read_rank_file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 300 kB corpus of the standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    assert main(["corpus", "--out", str(folder), "--max-bytes", "300000"]) == 0
    return folder


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_corpus_leaves_out_what_is_no_text_to_learn(tmp_path: Path) -> None:
    good = {f"pkg/mod{i}.py": f"value = {i}\n".encode() for i in range(60)}
    left_out = {
        "pkg/empty.py": b"\n",
        "pkg/copy.py": b"value = 1\n",
        "pkg/table.py": b"x = 1\n" * 100_000,
        "pkg/broken.py": b"\xff\xfe\n",
        "pkg/test/test_mod.py": b"assert 1\n",
        "site-packages/other.py": b"other = 1\n",
        "pkg/data.txt": b"text",
    }
    latin = {"pkg/latin.py": "# coding: latin-1\nname = 'café'\n".encode("latin-1")}
    write_tree(tmp_path / "lib", {**good, **left_out, **latin})
    options = ["--out", str(tmp_path / "out"), "--source", str(tmp_path / "lib")]
    assert main(["corpus", *options, "--validation-share", "0.2"]) == 0
    train = read_jsonl(tmp_path / "out" / "train.jsonl")
    validation = read_jsonl(tmp_path / "out" / "validation.jsonl")
    paths = {document["path"] for document in train + validation}
    assert len(train) + len(validation) == len(paths) == 61
    duplicates = {"pkg/mod1.py", "pkg/copy.py"}
    assert len(paths & duplicates) == 1
    assert paths - duplicates == set(good) - duplicates | set(latin)
    texts = {document["path"]: document["text"] for document in train + validation}
    assert texts["pkg/latin.py"].endswith("name = 'café'\n")
    assert 3 <= len(validation) <= 25  # 12 expected


def test_home_and_variables_are_expanded_in_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUT", "written")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    for number in range(60):
        (tmp_path / "files" / f"{number}.py").write_text(f"number = {number}\n" * 20)
    assert main(["corpus", "--source=~/files", "--out=$OUT/corpus"]) == 0
    out = ["--out", "~/${OUT}/ranks.tiktoken", "--vocab-size", "300"]
    assert main(["tokenizer", "--files", "$OUT/corpus/*.jsonl", *out]) == 0
    assert (tmp_path / "written" / "ranks.tiktoken").is_file()
    assert main(["corpus", "--source=~/files", "--out=$NO_SUCH_FOLDER/corpus"]) == 2
    assert "--out $NO_SUCH_FOLDER/corpus: the variable NO_SUCH_FOLDER is not set" in (
        capsys.readouterr().err
    )


def test_split_depends_on_the_path_only(tmp_path: Path, corpus: Path) -> None:
    again = tmp_path / "again"
    assert main(["corpus", "--out", str(again), "--max-bytes", "600000"]) == 0
    small = {d["path"] for d in read_jsonl(corpus / "validation.jsonl")}
    large = {d["path"] for d in read_jsonl(again / "validation.jsonl")}
    large_train = {d["path"] for d in read_jsonl(again / "train.jsonl")}
    assert small
    assert not large & large_train
    assert not small & large_train
    num_bytes = sum((again / f"{part}.jsonl").stat().st_size for part in ("train", "validation"))
    assert 500_000 < num_bytes < 700_000  # JSON adds escapes and paths to the text


def test_corpus_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing").mkdir()
    for source, words in (("nothing", "has 0 training and 0"), ("absent", "is not a folder")):
        options = ["--out", str(tmp_path / "out"), "--source", str(tmp_path / source)]
        assert main(["corpus", *options]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def random_texts(count: int) -> list[str]:
    """Code-like text, white space of many kinds, several scripts, emoji, combining marks."""
    generator = random.Random(0)
    pools = [
        "abcXYZ_ \n\t'sdé",
        " \n\r\t\u00a0\u2003\u0085\u2028",
        "日本語かな漢字한국어",
        "😀👩\u200d👧e\u0301ñ",
        "0123456789.,;:()[]{}",
        "".join(map(chr, range(32, 0x3000, 7))),
    ]
    return [
        "".join(generator.choice(generator.choice(pools)) for _ in range(generator.randint(1, 60)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_tiktoken_gives_the_ids_of_the_trained_tokenizer(corpus: Path, pattern: str) -> None:
    texts = [document["text"] for document in read_jsonl(corpus / "train.jsonl")]
    ranks, trained = train_bpe(iter(texts), 700, PATTERNS[pattern])
    assert sorted(ranks.values()) == list(range(700))
    assert {bytes([byte]) for byte in range(256)} <= set(ranks)
    encoding = tiktoken.Encoding(
        "trained", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )
    held_out = [document["text"] for document in read_jsonl(corpus / "validation.jsonl")]
    runs = [" " * n + "x" + "\n" * n + "\t" * n for n in (1, 2, 5, 40, 333)]
    for text in held_out + runs + random_texts(300):
        ids = encoding.encode_ordinary(text)
        assert ids == trained.encode(text).ids
        assert encoding.decode(ids) == text


def test_byte_letters_are_those_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for text in ("aé \n\x00", "\x7f\u00ad\u0120"):
        letters = "".join(byte_letters()[byte] for byte in text.encode())
        assert encode(text)[0][0] == letters


def test_vocabulary_report_and_section(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "new" / "tok.tiktoken", tmp_path / "report.json"
    options = ["--files", str(corpus / "train.jsonl"), "--out", str(out)]
    options += ["--vocab-size", "512", "--report", str(report)]
    assert main(["tokenizer", *options, "--special-tokens", "<|endoftext|>", "<🚀>"]) == 0
    assert len(read_rank_file(out)) == 510
    printed = capsys.readouterr().out
    section = tomllib.loads(printed[printed.index("[tokenizer]") :])["tokenizer"]
    assert section["special_tokens"] == {"<|endoftext|>": 510, "<🚀>": 511}
    assert section["path"] == str(out)
    tokenizer = load_tokenizer(
        TokenizerConfig(
            path=str(out), special_tokens={"<|endoftext|>": 510}, eos_token="<|endoftext|>"
        )
    )
    statistics = json.loads(report.read_text())
    texts = [document["text"] for document in read_jsonl(corpus / "train.jsonl")]
    counts: dict[int, int] = {}
    for text in texts:
        for token in tokenizer.encode(text):
            counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    entropy = -sum(n / total * np.log(n / total) for n in counts.values())
    assert statistics["vocab_size"] == 512
    assert statistics["num_tokens"] == total
    assert statistics["num_bytes"] == sum(len(text.encode()) for text in texts)
    assert statistics["unigram_entropy_nats"] == pytest.approx(entropy, rel=1e-9)
    assert statistics["bytes_per_token"] > 1.5


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy_nats(np.array([5, 0, 5])) == pytest.approx(np.log(2))
    assert unigram_entropy_nats(np.array([7, 0])) == 0.0
    assert unigram_entropy_nats(np.array([0, 0])) == 0.0


def test_statistics_count_bytes_and_not_characters(tmp_path: Path) -> None:
    statistics = corpus_statistics(["äö", "a", "ä"], byte_tokenizer(tmp_path))
    # The byte that both umlauts begin with, three times; EOS three times; two, one, one.
    entropy = sum(n / 10 * np.log(10 / n) for n in (3, 3, 2, 1, 1))
    assert statistics == CorpusStatistics(
        num_documents=3,
        num_bytes=7,
        num_tokens=10,
        bytes_per_token=0.7,
        unigram_entropy_nats=pytest.approx(entropy),
        vocab_size=257,
    )


def test_tokenizer_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text('{"text": "abc abc"}\n')
    out = str(tmp_path / "out")
    cases = [
        (["--files", str(tmp_path / "no.jsonl"), "--out", out], "no such file; did you"),
        (["--files", str(small), "--out", out], "which gives only 259 ids"),
        (["--files", str(small), "--out", out, "--text-column", "body"], "columns present: text"),
        (["--files", str(small), "--out", out, "--pattern", "(a"], "is not a valid expression"),
        (["--files", str(small), "--out", out, "--pattern", ""], "is empty"),
        (
            ["--files", str(small), "--out", out, "--special-tokens", ""],
            "--special-tokens '': is empty",
        ),
        (["--files", str(small), "--out", out, "--vocab-size", "9" * 14], "must be at most"),
        (["--files", str(small), "--out", str(tmp_path)], "is a folder"),
        (["--files", str(small), "--out", out, "--report", str(tmp_path)], "is a folder"),
        (["--files", str(small), "--out", ""], "--out '': is empty"),
        (["--files", "", "--out", out], "--files '': is empty"),
        (["--files", str(small), "--out", "/dev/null"], "/dev/null: is a device; name a file"),
        (
            ["--files", str(small), "--out", out, "--report", "/dev/null/x"],
            "/dev/null is no folder",
        ),
        (["--files", str(small), "--out", out, "--pattern", "gpt5"], "not a known pattern"),
    ]
    for options, message in cases:
        assert main(["tokenizer", *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    few = ["--files", str(small), "--out", out, "--vocab-size", "100"]
    assert main(["tokenizer", *few]) == 2
    assert "must be at least 257" in capsys.readouterr().err
