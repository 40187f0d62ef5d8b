"""Whether all ranks see the folder that rank 0 writes to, before they save a checkpoint's parts.

Nodes with a folder each save without a word, each its own part, and nobody can load the whole.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from titan_relay.config import Origins, RunConfig

_POLL_S = 0.1
_MOST_NAMED = 16


def check_shared_folder(run: RunConfig, origins: Origins, *, timeout_s: float = 10.0) -> None:
    """Refuse a checkpoint folder that is another one for some ranks; collective over all of them.

    Rank 0 writes a file of random name and content, all look for it, and it is removed again. A run
    without checkpoints has nothing to share: curves and traces are each of one rank.

    Args:
        timeout_s: for a file to show on other nodes; file systems of networks take their time.

    Raises:
        ConfigError: on every rank the same, naming the ranks that do not see it, and their hosts.
    """
    if not run.checkpoint.enable or dist.get_world_size() == 1:
        return
    folder, host = Path(run.dump_folder) / run.checkpoint.folder, socket.gethostname()
    token = [(f".shared-{secrets.token_hex(8)}", secrets.token_hex(8), host, "")]
    name, content, writer, failure = token[0]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        except OSError as error:
            token = [(name, content, writer, f"cannot be written to: {error.strerror}")]
    dist.broadcast_object_list(token, src=0)
    name, content, writer, failure = token[0]
    if failure:
        raise origins.error("dump_folder", run.dump_folder, failure)
    blind: list[str | None] = [None] * dist.get_world_size()
    sees = _shows(folder / name, content, timeout_s)
    dist.all_gather_object(blind, None if sees else host)
    if dist.get_rank() == 0:
        (folder / name).unlink(missing_ok=True)
    ranks = [f"{rank} ({each})" for rank, each in enumerate(blind) if each is not None]
    if ranks:
        more = [f"{len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else []
        named = ", ".join(ranks[:_MOST_NAMED] + more)
        raise origins.error(
            "dump_folder",
            run.dump_folder,
            f"{'ranks' if len(ranks) > 1 else 'rank'} {named} cannot see what rank 0 ({writer}) "
            f"writes to {folder}, so each would keep a part of every checkpoint; give the absolute "
            "path of a folder that all nodes share",
        )


def _shows(path: Path, content: str, timeout_s: float) -> bool:
    """Whether the file is there within the time, with that content."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(OSError):  # not there, or not yet
            if path.read_text() == content:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
