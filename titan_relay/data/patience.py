"""How many bad documents in a row a lane of an endless source puts up with."""

_SHUFFLED_EPOCHS = 64


def max_bad_in_a_row(num_documents: int, shuffle: bool) -> int:
    """The number after which further reading is as good as hopeless.

    In file order a lane meets the same documents again after at most `num_documents` of them.
    Shuffled, it meets a random one each time: where only one of n is good, 64 n in a row miss it
    with probability exp(-64).
    """
    return num_documents * (_SHUFFLED_EPOCHS if shuffle else 1)
