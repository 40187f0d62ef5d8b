"""What can go wrong in a relay, as types a caller can catch."""


class RelayUsageError(ValueError):
    """A wrong argument. The message names the argument, its value and what would be right."""


class NonFiniteError(ArithmeticError):
    """A NaN or an infinity in a layer's inputs; the message names layer, rank and token."""


class RingError(RuntimeError):
    """A transfer did not complete: a neighbour died, stalled or disagreed."""


class RingMisuseError(RuntimeError):
    """The ring's own code broke the order queue, commit, wait."""
