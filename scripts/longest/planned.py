"""The search over plans."""

from collections.abc import Callable, Sequence

from longest.result import Result, made_of, result_of
from titan_relay.config import RunConfig, degrees_of
from titan_relay.measure.devices import Device
from titan_relay.titan.plan.extrapolate import peak_of
from titan_relay.titan.plan.longest import Tried, longest_of, with_length
from titan_relay.titan.plan.plan import usable_bytes
from titan_relay.titan.plan.variants import variant_of
from titan_relay.units import in_words


def search_planned(
    run: RunConfig,
    world_size: int,
    variants: Sequence[str],
    device: Device,
    say: Callable[[str], None],
) -> list[Result]:
    """The longest sequence of each variant on `device`."""
    limit = usable_bytes(device)
    assert limit is not None
    results: list[Result] = []
    first = 0
    for number, name in enumerate(variants, 1):
        varied = variant_of(run, name)
        tries: list[Tried] = []

        def peak(
            seq_len: int,
            varied: RunConfig = varied,
            name: str = name,
            tries: list[Tried] = tries,
        ) -> Tried:
            moment = peak_of(with_length(varied, seq_len), world_size, device)
            say(f"  {name}: {seq_len:,} tokens take {in_words(moment.live_bytes)}")
            tries.append(
                Tried(
                    seq_len,
                    moment.live_bytes,
                    made_of(moment.place, moment.by_category, moment.host_bytes),
                )
            )
            return tries[-1]

        say(f"{name} ({number} of {len(variants)}), limit {in_words(limit)}")
        degrees = degrees_of(varied, world_size)
        found = longest_of(peak, varied, degrees, limit, first or varied.training.seq_len)
        first = first if found is None else found.seq_len
        results.append(result_of(name, found, tries))
    return results
