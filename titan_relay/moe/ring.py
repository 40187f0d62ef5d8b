"""One ring per expert-parallel group: its own communicator, its control channel, its telemetry.

A ring's messages never share a communicator with anything else, so it has a process group of its
own. Making one is a collective call over the group's ranks; it happens at ``relay_ring(group)``,
which a trainer calls once while it sets up, or else in the first ``relay_moe`` of the group, which
every rank of the group reaches in the same order (the ring itself requires that).
"""

import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from titan_relay.moe.telemetry import RingTelemetry
from titan_relay.moe.transport import (
    Control,
    Link,
    NoControl,
    ProcessGroupControl,
    ProcessGroupLink,
)
from titan_relay.private_torch import group_timeout, new_group_named


@dataclass(frozen=True, eq=False)
class Ring:
    """A rank's place in a ring of ``link.size`` ranks.

    Over ``control`` ranks compare a few numbers per forward, so that a disagreement is an error on
    every rank instead of a hang.
    """

    link: Link
    control: Control
    telemetry: RingTelemetry = field(default_factory=RingTelemetry)


# torch.distributed's groups are process-wide, and a registered op can be handed only a group's
# name; this maps each live group to its ring and forgets it with the group.
_rings: "weakref.WeakKeyDictionary[dist.ProcessGroup, Ring]" = weakref.WeakKeyDictionary()


def relay_ring(group: dist.ProcessGroup, timeout: timedelta | None = None) -> Ring:
    """The ring over an expert-parallel group; made at the first call, the same object after.

    Args:
        group: at least two ranks; ring order is group order.
        timeout: how long a rank waits for a neighbour. Default: the group's own timeout.

    The first call is a collective over ``group``; later ones are local.
    """
    ring = _rings.get(group)
    if ring is None:
        ring = _make_ring(group, timeout or group_timeout(group))
        _rings[group] = ring
    return ring


def set_ring_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let the group's ring, if it has one, wait ``timeout`` for a neighbour from now on.

    Local; call it on all ranks. A trainer allows more time for its first step than for later ones.
    """
    ring = _rings.get(group)
    if ring is not None:
        for part in (ring.link, ring.control):
            if isinstance(part, ProcessGroupLink | ProcessGroupControl):
                part.set_timeout(timeout)


def _make_ring(group: dist.ProcessGroup, timeout: timedelta) -> Ring:
    if dist.get_backend(group) == "fake":
        # A dry run: on fake tensors the layer sends nothing, on real ones the control refuses.
        return Ring(ProcessGroupLink(group, timeout), NoControl())
    messages = sibling_group(group, "relay_ring", dist.get_backend_config(group), timeout)
    control = sibling_group(group, "relay_control", "gloo", timeout)
    return Ring(ProcessGroupLink(messages, timeout), ProcessGroupControl(control))


def sibling_group(
    parent: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group over ``parent``'s ranks, in its order. A collective over ``parent``, and only it.

    ``torch.distributed.new_group(..., use_local_synchronization=True)`` would be the public way,
    but it names the group after how many groups the calling rank already knows. Ranks that belong
    to different numbers of groups (pipeline stages, test subgroups) then wait under different names
    for ever. Here the name derives from the parent's, which is the same on all its ranks.

    Args:
        purpose: unique among the siblings of one parent.
        backend: "gloo", "nccl" or a map of devices to them.
    """
    return new_group_named(
        f"{parent.group_name}:{purpose}",
        dist.get_process_group_ranks(parent),
        backend=backend,
        timeout=timeout,
        purpose=purpose,
    )
