"""One tokenizer for both kinds of vocabulary: tiktoken rank files and Hugging Face folders.

What the configuration says is what happens: BOS and EOS are added when `add_bos` and `add_eos`
say so, once each, whatever a Hugging Face template would do, also where both are the same token.
The spelling of a special token inside a document (a page *about* ``<|endoftext|>``) stays
ordinary text unless `allow_special_in_text` is set.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_relay.config.schema_data import TokenizerConfig
from titan_relay.data.documents import DataError
from titan_relay.data.splitting import MAX_BLANK_CHARS, cut_long_runs, resolve_pattern
from titan_relay.data.tokenizer_files import (
    named_boundaries,
    named_specials,
    read_rank_file,
    tokenizer_file,
)


class _Backend(Protocol):
    """Text without BOS or EOS to ids and back."""

    identity: bytes  # what the ids depend on, for the fingerprint

    @property
    def vocab_size(self) -> int:
        """The highest id that text can get, plus one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class _TiktokenBackend:
    def __init__(self, config: TokenizerConfig, path: Path) -> None:
        import tiktoken

        ranks = read_rank_file(path)
        folder = Path(config.path)
        named = named_specials(folder) if folder.is_dir() else {}
        if not config.allow_special_in_text:
            # Text gets none of them then; one that cannot be is missed only if it is BOS or EOS.
            taken = {*ranks.values(), *config.special_tokens.values()}
            named = {token: at for token, at in named.items() if at >= 0 and at not in taken}
        specials = named | config.special_tokens
        self._check_special_ids(ranks, specials, path)
        pattern = resolve_pattern(config.pattern)
        try:
            self._encoding = tiktoken.Encoding(
                name=path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
            )
        except (ValueError, KeyError) as error:
            raise DataError(
                f"tokenizer.pattern = {config.pattern!r} is not a valid regular expression: {error}"
            ) from error
        self._specials = specials
        self._allowed = set(specials) if config.allow_special_in_text else set()
        usable = specials if config.allow_special_in_text else config.special_tokens
        self.vocab_size = 1 + max(*ranks.values(), *usable.values())
        self.identity = json.dumps([pattern, sorted(specials.items())]).encode() + path.read_bytes()

    @staticmethod
    def _check_special_ids(ranks: dict[bytes, int], specials: dict[str, int], path: Path) -> None:
        taken = set(ranks.values())
        for token, token_id in specials.items():
            if token_id in taken or token_id < 0:
                raise DataError(
                    f'tokenizer.special_tokens "{token}" = {token_id} is taken or negative; '
                    f"ids from {max(taken) + 1} on are free in {path}"
                )
            taken.add(token_id)

    def encode(self, text: str) -> list[int]:
        pieces = cut_long_runs(text, MAX_BLANK_CHARS, blanks_only=True)
        return [token for piece in pieces for token in self._encode_piece(piece)]

    def _encode_piece(self, text: str) -> list[int]:
        if self._allowed:
            return self._encoding.encode(text, allowed_special=self._allowed, disallowed_special=())
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        return self._specials.get(token)


class _HuggingFaceBackend:
    def __init__(self, config: TokenizerConfig, path: Path) -> None:
        from tokenizers import Tokenizer as RustTokenizer

        try:
            self._tokenizer: Any = RustTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is not a tokenizer.json: {error}") from error
        # A file may carry truncation or padding settings of the model it was saved with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        for token, token_id in config.special_tokens.items():
            if self._tokenizer.token_to_id(token) != token_id:
                raise DataError(
                    f'tokenizer.special_tokens "{token}" = {token_id}, but {path} has '
                    f"{self._tokenizer.token_to_id(token)}; leave the key out for huggingface"
                )
        self._allow_special = config.allow_special_in_text
        self._tokenizer.encode_special_tokens = not self._allow_special
        self.identity = path.read_bytes()

    @property
    def vocab_size(self) -> int:
        # Added tokens that are not special are found in any text.
        added = self._tokenizer.get_added_tokens_decoder().items()
        usable = (at for at, token in added if self._allow_special or not token.special)
        return 1 + max(*self._tokenizer.get_vocab(with_added_tokens=False).values(), *usable)

    def encode(self, text: str) -> list[int]:
        # add_special_tokens=False: the template must not add what this class adds itself.
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is not None and not self._allow_special:
            # Some files list BOS or EOS as an ordinary added token, which text would match.
            self._tokenizer.add_special_tokens([token])
        return token_id


@dataclass(frozen=True)
class Tokenizer:
    """Encodes documents for training.

    `bos_id` and `eos_id` are None where the vocabulary has no such token. `fingerprint` changes
    whenever the ids of some document could.
    """

    backend: _Backend
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """The highest id that a row can hold (EOS pads rows) plus one: what an embedding needs.

        Special tokens that no document gets do not count.
        """
        used = (self.bos_id if self.add_bos else None, self.eos_id)
        return max(self.backend.vocab_size, *(1 + each for each in used if each is not None), 0)

    def encode(self, text: str) -> list[int]:
        """Ids of one document, BOS and EOS as configured.

        A BOS or EOS that the text itself already supplies (only possible with
        `allow_special_in_text`) is not doubled.
        """
        ids = self.backend.encode(text)
        head: list[int] = []
        if self.add_bos and self.bos_id is not None:
            head, ids = [self.bos_id], ids[1:] if ids[:1] == [self.bos_id] else ids
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return head + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(ids)


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Builds the tokenizer of a `[tokenizer]` section; reads local files only.

    Raises DataError where a file is missing or malformed, where `add_bos` or `add_eos` asks for a
    token that the vocabulary does not have, or where the section names one that it has not. What
    only the folder names, and the run does not use, need not be there.
    """
    if not config.path:
        raise DataError("tokenizer.path is empty; give a rank file or a tokenizer folder")
    try:
        path = tokenizer_file(config)
    except DataError as error:
        raise DataError(f'tokenizer.path = "{config.path}": {error}') from error
    huggingface = config.kind == "huggingface"
    # A rank file that is named by itself has no model's folder around it.
    in_folder = huggingface or path != Path(config.path)
    own_bos, own_eos = named_boundaries(path.parent) if in_folder else (None, None)
    backend: _Backend = (_HuggingFaceBackend if huggingface else _TiktokenBackend)(config, path)
    bos_id = _boundary_id(backend, path, "bos", config.bos_token, own_bos)
    eos_id = _boundary_id(backend, path, "eos", config.eos_token, own_eos)
    for name, wanted, token_id, own in (
        ("bos", config.add_bos, bos_id, own_bos),
        ("eos", config.add_eos, eos_id, own_eos),
    ):
        if wanted and token_id is None:
            known = (
                f'"{own}", the folder\'s own, is not in {path}'
                if own
                else f"no {name} token is known"
            )
            raise DataError(
                f"tokenizer.add_{name} = true, but {known}; set tokenizer.{name}_token to one of "
                f"the vocabulary, or tokenizer.add_{name} = false"
            )
    flags = [config.kind, bos_id, eos_id, config.add_bos, config.add_eos]
    flags.append(config.allow_special_in_text)
    digest = hashlib.sha256(json.dumps(flags).encode() + backend.identity)
    return Tokenizer(
        backend, bos_id, eos_id, config.add_bos, config.add_eos, digest.hexdigest()[:16]
    )


def _boundary_id(
    backend: _Backend, path: Path, name: str, given: str | None, own: str | None
) -> int | None:
    """The id of the token that the section gives, else of the folder's own; None if neither is."""
    token = given or own
    token_id = backend.token_id(token) if token else None
    if given and token_id is None:
        raise DataError(
            f'tokenizer.{name}_token = "{given}" is not in {path}; name a token of the vocabulary '
            "or add it to tokenizer.special_tokens"
        )
    return token_id
