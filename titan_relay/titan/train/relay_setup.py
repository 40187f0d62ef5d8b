"""What the relay of a run will do, known before it starts (which ring, how many bytes, how much
memory), and its kernels compiled before step 1, so that no step waits for a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torchtitan.tools.logging import logger

from titan_relay.config import RunConfig, degrees_of
from titan_relay.config.degrees import microbatch_tokens
from titan_relay.config.schema_relay import RelayConfig, RelayKeys
from titan_relay.moe import (
    LayerShape,
    RelayOptions,
    Traffic,
    WorkingMemory,
    backward_memory,
    backward_traffic,
    circulations,
    forward_memory,
    forward_traffic,
    warm_up,
)
from titan_relay.titan.device import on_cpu
from titan_relay.units import in_mib


def relay_options(run: RunConfig) -> RelayOptions:
    """The options of `[relay]`."""
    given = {key.name: getattr(run.relay, key.name) for key in fields(RelayKeys)}
    given["deterministic"] |= run.debug.deterministic
    return RelayOptions(**given, check_finite=run.debug.check_finite)


@dataclass(frozen=True)
class ExpectedRelay:
    """One MoE layer on one rank, for one microbatch: traffic and peak working memory."""

    directions: dict[str, tuple[Traffic, WorkingMemory]]  # of "forward" and "backward"
    options: RelayOptions

    def lines(self) -> list[str]:
        """The same in words, a line a direction."""
        return [
            self._line(direction, traffic, memory.total_bytes)
            for direction, (traffic, memory) in self.directions.items()
        ]

    def may_turn(self, traffic: Traffic) -> bool:
        """Whether a call's routing may make experts circulate instead of tokens."""
        return len(circulations(traffic, self.options)) > 1

    def _line(self, direction: str, traffic: Traffic, memory_bytes: int) -> str:
        turns = ""
        if self.may_turn(traffic):
            turns = (
                " (experts, where the routing would let a rank compute more than "
                f"{self.options.max_imbalance:g} times its share)"
            )
        return (
            f"Relay {direction}: {traffic.circulate} circulate{turns}; a rank sends per layer "
            f"{in_mib(traffic.experts_bytes)} with experts circulating or "
            f"{in_mib(traffic.tokens_bytes)} with tokens circulating; "
            f"working memory {in_mib(memory_bytes, 1)}"
        )

    def curves(self) -> dict[str, float]:
        """The same as numbers; `circulates_tokens` is 1 where tokens go round, else 0."""
        return {
            f"relay/expected/{direction}/{name}": value
            for direction, (traffic, _) in self.directions.items()
            for name, value in (
                ("experts_bytes", float(traffic.experts_bytes)),
                ("tokens_bytes", float(traffic.tokens_bytes)),
                ("circulates_tokens", float(traffic.circulate == "tokens")),
            )
        }


def expected_relay(
    run: RunConfig, world_size: int, *, for_cpu: bool | None = None
) -> ExpectedRelay | None:
    """What a run can expect; None without a relay or without expert parallelism.

    for_cpu: whether it runs on CPU; None: as this machine would.
    """
    if run.relay.dispatcher != "relay" or degrees_of(run, world_size).ep == 1:
        return None
    for_cpu = on_cpu() if for_cpu is None else for_cpu
    shape, options = relay_shape(run, world_size, for_cpu=for_cpu), relay_options(run)
    device = torch.device("cpu" if for_cpu else "cuda")
    return ExpectedRelay(
        {
            "forward": (forward_traffic(shape, options), forward_memory(shape, options, device)),
            "backward": (backward_traffic(shape, options), backward_memory(shape, options, device)),
        },
        options,
    )


def unused_keys(run: RunConfig, world_size: int) -> list[str]:
    """Keys of `[relay]` that the run sets and nothing reads: with the all-to-all all but one, on
    a ring of one those of the ring. They stay legal, so that one file serves to compare."""
    names = [each.name for each in fields(RelayConfig) if each.name != "dispatcher"]
    if run.relay.dispatcher == "relay":
        alone = degrees_of(run, world_size).ep == 1
        names = ["circulate", "max_imbalance", "num_slices"] if alone else []
    default = RelayConfig()
    return [f"relay.{name}" for name in names if getattr(run.relay, name) != getattr(default, name)]


def relay_shape(run: RunConfig, world_size: int, *, for_cpu: bool) -> LayerShape:
    """Every MoE layer of the run, for one microbatch."""
    degrees = degrees_of(run, world_size)
    bfloat16 = not for_cpu and run.training.mixed_precision_param == "bfloat16"
    return LayerShape(
        num_ranks=degrees.ep,
        num_tokens=run.relay.max_tokens_per_rank or microbatch_tokens(run, degrees),
        dim=run.model.dim,
        expert_dim=run.model.moe.expert_dim,
        num_experts=run.model.moe.num_experts,
        top_k=run.model.moe.top_k,
        dtype=torch.bfloat16 if bfloat16 else torch.float32,
    )


def warm_up_kernels(run: RunConfig, world_size: int, device: torch.device) -> None:
    """Compile, or load from Triton's cache, what every MoE layer launches; says how long it took.

    Does nothing where plain PyTorch computes the experts.
    """
    if run.relay.dispatcher != "relay":
        return
    shape = relay_shape(run, world_size, for_cpu=on_cpu())
    seconds = warm_up(shape, relay_options(run), device)
    if seconds > 0.0:
        logger.info(f"Relay kernels: ready before the first step, after {seconds:.1f} s")
