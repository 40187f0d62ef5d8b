"""A wrong configuration with the one line that the user sees.

A case is a file ``case.toml`` that extends the correct one of `tests.config.files`, or is a whole
file by itself, and a command line over it.
"""

from dataclasses import dataclass

from tests.config.files import GOOD


@dataclass(frozen=True)
class Wrong:
    """One wrong configuration.

    name: what is checked. message: all that is printed, with {folder} for the working directory.
    toml: text of case.toml below its base. argv: arguments after ``--config case.toml``.
    whole: the file's bytes instead of `toml`.
    """

    name: str
    message: str
    toml: str = ""
    argv: tuple[str, ...] = ()
    ranks: int = 1
    whole: bytes | None = None

    def content(self) -> bytes:
        """The bytes of case.toml."""
        return self.whole if self.whole is not None else f'base = "good.toml"\n{self.toml}'.encode()


def without(line: str) -> bytes:
    """The correct file without one of its lines."""
    assert line in GOOD
    return GOOD.replace(line + "\n", "").encode()
