"""Paths as a user writes them: ``~`` and variables of the environment stand for what they name.

A shell does not expand them in a file, in quotes or after ``--key=``, so they are expanded here,
and in the same way wherever a path is read: in keys, in the names of configuration files, in the
options of every command. Otherwise a folder named ``~`` is made, or a file that is there is not
found.
"""

import os
import re

from titan_relay.config.errors import Place

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)


class NoSuchName(ValueError):
    """A path names a variable or a user that is not there; ``str()`` says what to do about it."""


def expanded(text: str) -> str:
    """`text` with ``~``, ``~user``, ``$NAME`` and ``${NAME}`` replaced; other text stays as it is.

    Raises:
        NoSuchName: the variable is unset or empty, which would make ``$RUNS/a`` the path ``/a``.
    """
    home = os.path.expanduser(text)
    if home.startswith("~"):
        user = home.partition("/")[0]
        raise NoSuchName(f'there is no home folder of {user}; write "./{text}" for that name here')
    return _VARIABLE.sub(_value, home)


def _value(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if not os.environ.get(name):
        raise NoSuchName(f"the variable {name} is not set here; export it, or write the path out")
    return os.environ[name]


def read_path(text: str, place: Place) -> str:
    """`text`, written at `place`, expanded; raises `ConfigError`."""
    try:
        return expanded(text)
    except NoSuchName as error:
        raise place.error(text, str(error)) from error
