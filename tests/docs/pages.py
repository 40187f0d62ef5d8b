"""The pages of the documentation, and what stands between their fences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]

FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What stands between two fences; `file` is the path after the language, or empty.

    A `diff` changes that file, any other language is all of it.
    """

    language: str
    file: str
    text: str

    def write(self, tree: Path) -> None:
        """Make or change the file in a copy of the tree."""
        path = tree / self.file
        if self.language != "diff":
            assert not path.exists(), f"{self.file} is there already"
            path.write_text(self.text, encoding="utf-8")
            return
        for hunk in self.text.split("...\n"):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in f" {s}") for s in "-+")
            whole = path.read_text("utf-8")
            assert whole.count(old) == 1, f"{self.file} has no such place, or several:\n{old}"
            path.write_text(whole.replace(old, new), encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    """All of a page, in order."""
    return [Block(*found) for found in FENCE.findall(page.read_text("utf-8"))]


def fragments(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks in one language, but for those that are a whole file."""
    return [b.text for b in blocks(page) if b.language == language and not b.file]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text("utf-8"))
