"""LiveBytes on two gloo ranks: FSDP2's resized storages, DTensors, collectives in operators.

One spawned group serves all checks, since starting it is what takes time. float32 throughout.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.distributed import run_ranks
from titan_relay.measure import LiveBytes

WORLD_SIZE = 2
DIM = 8
WEIGHT_BYTES = DIM * DIM * 4
SHARD_BYTES = WEIGHT_BYTES // WORLD_SIZE
BATCH_BYTES = 3 * DIM * 4


def assert_live(tracker: LiveBytes, expected_bytes: int, why: str = "") -> None:
    """What is live once gloo's thread has let go of a collective that has just ended."""
    deadline = time.monotonic() + 10
    while tracker.live_bytes != expected_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    assert tracker.live_bytes == expected_bytes, why


@torch.library.custom_op("live_bytes_test::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    """Send `x` to the other rank through a buffer, like a ring hop."""
    other = 1 - dist.get_rank()
    buffer = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, buffer, other)]
    )
    for work in works:
        work.wait()
    return buffer + 1


def check_dtensor_counts_the_local_part(mesh: DeviceMesh) -> None:
    full = torch.ones(10, 10)
    x = distribute_tensor(full, mesh, [Shard(0)])
    with LiveBytes() as tracker:
        y = x + 1
        assert_live(tracker, 200, "half of 10 x 10")
        # The first call for these shapes: DTensor derives the result's from fake global tensors.
        assert tracker.peak_bytes == 200
        z = y.redistribute(mesh, [Replicate()])
        assert_live(tracker, 200 + 400)
        w = z.to_local()
        assert_live(tracker, 200 + 400)
        del y, z, w
        assert_live(tracker, 0)
        tracker.include(x)
        assert_live(tracker, x.to_local().untyped_storage().nbytes())


def check_fake_dtensors_count_the_local_part(mesh: DeviceMesh) -> None:
    with FakeTensorMode(), LiveBytes() as tracker:
        x = DTensor.from_local(torch.ones(5, 20), mesh, [Shard(0)], run_check=False)
        y = x * 3
        assert (tracker.live_bytes, tracker.peak_bytes) == (800, 800)
        del x, y


def check_fsdp_frees_and_refills(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    x = torch.ones(3, DIM)
    # FSDP makes its unsharded parameters on first use; they exist, empty, before the tracker.
    model(x).sum().backward()
    model.zero_grad()

    inside_layers: list[int] = []
    with LiveBytes() as tracker:
        for layer in model:
            layer.register_forward_hook(lambda *_: inside_layers.append(tracker.live_bytes))
        tracker.include(model)
        assert_live(tracker, 2 * SHARD_BYTES, "the shards, not the global sizes")
        with torch.no_grad(), tracker.phase("forward") as forward:
            y = model(x)
        assert_live(tracker, 2 * SHARD_BYTES + BATCH_BYTES, "resharded, only y is left")
        # The hook runs before the layer reshards: at least its own weight is whole, beside the
        # layer's output (and the second layer's input).
        assert inside_layers[0] >= 2 * SHARD_BYTES + WEIGHT_BYTES + BATCH_BYTES
        assert inside_layers[1] >= 2 * SHARD_BYTES + WEIGHT_BYTES + 2 * BATCH_BYTES
        assert forward.peak_bytes >= max(inside_layers)
        resizes = [op for op in forward.peak.by_op() if "resize" in op]
        assert resizes, "the refill is attributed to the resize"
        del y
        peaks_bytes = []
        # The first backward after a forward without one prefetches a layer too many: not compared.
        for _ in range(3):
            with tracker.phase("train") as train:
                model(x).sum().backward()
            # The shards and their gradients; the root holds no weight of its own.
            assert_live(tracker, 4 * SHARD_BYTES)
            peaks_bytes.append(train.peak_bytes)
            model.zero_grad()
            assert_live(tracker, 2 * SHARD_BYTES)
        # The figure repeats, but for when gloo's thread drops the buffers of a finished collective:
        # an all-gather's result, a reduce-scatter's input and result.
        assert abs(peaks_bytes[1] - peaks_bytes[2]) <= 2 * WEIGHT_BYTES + SHARD_BYTES
        # In the last layer's backward at least: the shards, its whole weight and gradient, its
        # input, the gradient of that input.
        assert peaks_bytes[2] >= 2 * SHARD_BYTES + 2 * WEIGHT_BYTES + 2 * BATCH_BYTES


def check_a_ring_hop_inside_an_op() -> None:
    x = torch.full((1000,), float(dist.get_rank()))
    with LiveBytes() as tracker:
        y = exchange(x)
        assert torch.equal(y, torch.full((1000,), 2.0 - dist.get_rank()))
        assert (tracker.live_bytes, tracker.peak_bytes) == (4000, 8000)


def run_checks() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    check_dtensor_counts_the_local_part(mesh)
    check_fake_dtensors_count_the_local_part(mesh)
    check_fsdp_frees_and_refills(mesh)
    check_a_ring_hop_inside_an_op()


def test_on_two_ranks() -> None:
    run_ranks(run_checks, WORLD_SIZE)
