"""A second process group over the ranks of an existing one.

``torch.distributed.new_group(..., use_local_synchronization=True)`` would be the public way, but it
names the group after how many groups the calling rank already knows. Ranks that belong to
different numbers of groups (pipeline stages, test subgroups) then wait under different names for
ever. Here the name derives from the parent's, which is the same on all its ranks.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def sibling_group(
    parent: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group over ``parent``'s ranks, in its order. A collective over ``parent``, and only it.

    Args:
        purpose: unique among the siblings of one parent.
        backend: "gloo", "nccl" or a map of devices to them.
    """
    ranks = dist.get_process_group_ranks(parent)
    default = c10d._get_default_group()
    bound_device = default.bound_device_id
    # With a bound device, NCCL would split the default group's communicator, which every rank of
    # the world would have to join. Unbound, it makes one of its own.
    default.bound_device_id = None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            c10d.Backend(backend),
            c10d._get_default_store(),
            f"{parent.group_name}:{purpose}",  # type: ignore[arg-type]
            timeout=timeout,
            group_desc=purpose,
        )
    finally:
        default.bound_device_id = bound_device
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group
