"""Time saved per retained byte on this machine, by sequence length, and what a budget buys.

    python scripts/plot_retention.py --dim 512 --heads 8 --kv-heads 1 --head-dim 128 \\
        --lengths 512,1024,2048,4096 --out docs/img/retention.png

Measures one layer's attention kernel and its projections forward, which is what levels "output" and
"full" do not compute again, and plots milliseconds saved per MiB kept for either, and the share of
the recomputation that is saved as the budget of a model of 48 such layers grows.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kernel_bench.timing import Timer
from titan_relay.commands.arguments import script_parser
from titan_relay.ops import DocumentMask, document_attention
from titan_relay.recompute.levels import LayerCost, choose_levels
from titan_relay.units import MIB

NUM_LAYERS = 48
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """One layer's attention."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int


def measure(shape: Shape, length: int, device: str) -> LayerCost:
    """One layer's costs on one sequence of `length` tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x_LD = torch.randn(length, shape.dim, device=device, dtype=dtype)
    features = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    weight = torch.randn(features, shape.dim, device=device, dtype=dtype)
    qkv = F.linear(x_LD, weight).view(1, length, -1, shape.head_dim)
    q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
    place = torch.arange(length, dtype=torch.int32)[None]
    mask = DocumentMask(place, torch.zeros_like(place), place)

    def kernel() -> torch.Tensor:
        if device == "cpu":
            return document_attention(q, k, v, mask, shape.head_dim**-0.5)
        q_h, k_h, v_h = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q_h, k_h, v_h, is_causal=True, enable_gqa=True)

    timer = Timer(torch.device(device), REPEATS, warmup=1)
    return LayerCost(
        layer=0,
        output_bytes=length * shape.heads * (shape.head_dim * dtype.itemsize + 4),
        output_seconds=timer.ms(kernel) / 1000,
        full_bytes=length * features * dtype.itemsize,
        full_seconds=timer.ms(lambda: F.linear(x_LD, weight)) / 1000,
    )


def saved_share(cost: LayerCost, share: float) -> float:
    """Of the recomputation of all layers, when `share` of what they could keep is kept."""
    layers = [
        LayerCost(i, cost.output_bytes, cost.output_seconds, cost.full_bytes, cost.full_seconds)
        for i in range(NUM_LAYERS)
    ]
    budget = share * NUM_LAYERS * cost.bytes_at("full")
    return choose_levels(layers, budget).seconds / (NUM_LAYERS * cost.seconds_at("full"))


def ms_per_mib(cost: LayerCost) -> tuple[float, float]:
    """What a MiB saves that is kept of the kernel's output, and of the projections'."""
    return (
        1000 * cost.output_seconds * MIB / cost.output_bytes,
        1000 * cost.full_seconds * MIB / cost.full_bytes,
    )


def plot(costs: dict[int, LayerCost], device: str, path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="tight")
    left, right = figure.subplots(1, 2)
    lengths = list(costs)
    levels = ('level "output": the kernel', 'level "full": the projections')
    for index, name in enumerate(levels):
        values = [ms_per_mib(cost)[index] for cost in costs.values()]
        left.plot(lengths, values, marker="o", label=name)
    left.set(xscale="log", xlabel="tokens in a sequence", ylabel="ms saved per MiB kept")
    left.set_xticks(lengths, [str(length) for length in lengths])
    left.minorticks_off()
    left.legend()
    shares = [i / 100 for i in range(101)]
    for length, cost in costs.items():
        right.plot(shares, [saved_share(cost, share) for share in shares], label=f"{length} tokens")
    right.set(xlabel="budget, as a share of what level full keeps", ylabel="recomputation saved")
    right.legend()
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} thread(s)"
    )
    figure.suptitle(f"Attention of one layer on {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, plot."""
    parser = script_parser(__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--out", type=Path, default=Path("outputs/retention.png"))
    args = parser.parse_args()
    shape = Shape(args.dim, args.heads, args.kv_heads, args.head_dim)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [int(each) for each in args.lengths.split(",")]
    costs = {}
    print("tokens | kernel ms | ms per MiB | projections ms | ms per MiB")
    for number, length in enumerate(lengths, 1):
        cost = costs[length] = measure(shape, length, device)
        kernel, projections = ms_per_mib(cost)
        print(
            f"{length} | {1000 * cost.output_seconds:.2f} | {kernel:.2f} | "
            f"{1000 * cost.full_seconds:.2f} | {projections:.2f}   ({number} of {len(lengths)})"
        )
    plot(costs, device, args.out)
    print(f"Wrote {args.out}")


if __name__ == "__main__":
    main()
