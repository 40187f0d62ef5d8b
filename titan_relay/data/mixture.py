"""Which source of a mixture a lane reads its next document from."""

from collections.abc import Sequence

_GOLDEN = 0.6180339887498949


def choose_source(
    shares: Sequence[float], num_tokens: Sequence[int], open_sources: Sequence[bool], lane: int
) -> int | None:
    """The open source that is furthest behind its share of this lane's tokens.

    A source that ran out leaves its share to the others. Ties go to the earlier source. Before
    a lane has any token, every source is equally far behind; the first choice is then a point of
    a low-discrepancy sequence over the lanes, so that the first step already is a mixture and the
    lanes do not change sources in lockstep. Deterministic: depends on the arguments only.

    Args:
        shares: target share of each source, summing to 1.
        num_tokens: tokens this lane has taken from each source.
        open_sources: whether each source still has documents for this lane.

    Returns: an index into `shares`, or None when no source is open.
    """
    candidates = [index for index, is_open in enumerate(open_sources) if is_open]
    if not candidates:
        return None
    open_share = sum(shares[index] for index in candidates)
    total = sum(num_tokens[index] for index in candidates)
    if sum(num_tokens) == 0:
        point = ((lane + 0.5) * _GOLDEN) % 1.0 * open_share
        for index in candidates:
            point -= shares[index]
            if point < 0:
                return index
        return candidates[-1]
    return max(candidates, key=lambda i: (shares[i] / open_share * (total + 1) - num_tokens[i], -i))
