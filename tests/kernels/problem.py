"""Small layers with chosen loads for the tests of kernels, and their float64 truth.

Shape legend: T tokens, K top-k, N = T * K routed rows (row ``t * K + k``), D model dimension, F
expert hidden dimension, g experts, n rows of one expert.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from relay_kernels import ExpertWeights, RoutedTokens, SwiGLU
from relay_kernels.rows import Chunk, chunks
from relay_kernels.tuning import arch_of, shape_class, trial, tuned_config
from relay_kernels.workspace import OrderedSum
from tests.kernels.reference import activated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# One rounding to 16 bits, relative. A device rounds to nearest; the interpreter cuts off bfloat16.
ROUNDING = {
    torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7,
    torch.float16: 2**-11,
}
# What rows past the last offset hold: an access by it would be far out of bounds.
JUNK_ROW = 2**31 - 1
Workspace = TypeVar("Workspace")


@dataclass
class Problem:
    """One group of experts, expert ``j`` with ``loads[j]`` rows, and rows of nobody on both sides.

    ``rows_N`` begins with ``margin`` junk rows and ends with as many, so that the first offset is
    not 0 and the last is not N.
    """

    loads: tuple[int, ...]
    num_tokens: int
    top_k: int
    dim: int
    expert_dim: int
    dtype: torch.dtype = torch.float32
    has_biases: bool = False
    activation: SwiGLU = field(default_factory=SwiGLU)
    margin: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        experts, dim, hidden = len(self.loads), self.dim, self.expert_dim

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=random) * scale).to(self.dtype).to(DEVICE)

        self.x_TD = normal(self.num_tokens, dim)
        self.dout_TD = normal(self.num_tokens, dim)
        self.scores_TK = torch.rand(self.num_tokens, self.top_k, generator=random).to(DEVICE)
        tensors = [
            normal(experts, hidden, dim, scale=dim**-0.5),
            normal(experts, dim, hidden, scale=hidden**-0.5),
            normal(experts, hidden, dim, scale=dim**-0.5),
        ]
        if self.has_biases:
            tensors += [normal(experts, hidden), normal(experts, dim), normal(experts, hidden)]
        self.weights = ExpertWeights(*tensors)
        rows = rows_by_load(self.loads, self.num_tokens, self.top_k, random)
        junk = torch.full((self.margin,), JUNK_ROW, dtype=torch.int32)
        self.rows_N = torch.cat([junk, rows.to(torch.int32), junk]).to(DEVICE)
        bounds = [*itertools.accumulate(self.loads, initial=self.margin)]
        self.segments = list(itertools.pairwise(bounds))

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def tokens(self) -> RoutedTokens:
        return RoutedTokens(self.x_TD, self.scores_TK, self.rows_N, self.segments)

    @property
    def scores_N(self) -> torch.Tensor:
        return self.scores_TK.view(-1)

    def chunks(self, max_rows: int) -> list[Chunk]:
        return list(chunks(self.tokens, max_rows, rows_per_expert=16))

    def ordered(self, max_rows: int) -> OrderedSum:
        positions_N = self.empty(self.num_rows, dtype=torch.int32)
        return OrderedSum(self.empty(max_rows, self.dim), positions_N)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer as a reused allocation may be: full of NaN, or of junk."""
        dtype = dtype or self.dtype
        value = math.nan if dtype.is_floating_point else JUNK_ROW
        return torch.full(shape, value, dtype=dtype, device=DEVICE)

    def true_hidden(self) -> torch.Tensor:
        """float64 ``a`` of the rows from the first offset to the last."""
        w1, _, w3, b1, _, b3 = self.true_weights()
        pieces = []
        for expert, (start, end) in enumerate(self.segments):
            x_nD = self.x_TD[self.rows_N[start:end].long() // self.top_k].double()
            h1_nF, h3_nF = x_nD @ w1[expert].t(), x_nD @ w3[expert].t()
            if b1 is not None:
                h1_nF, h3_nF = h1_nF + b1[expert], h3_nF + b3[expert]
            pieces.append(activated(h1_nF, h3_nF, self.activation))
        return torch.cat(pieces)

    def true_out(self, a: torch.Tensor) -> torch.Tensor:
        """float64 ``out`` from the ``a`` of the rows from the first offset to the last."""
        _, w2, _, _, b2, _ = self.true_weights()
        out_TD = torch.zeros(self.num_tokens, self.dim, dtype=torch.float64, device=DEVICE)
        base = self.segments[0][0]
        for expert, (start, end) in enumerate(self.segments):
            row_n = self.rows_N[start:end].long()
            y_nD = a[start - base : end - base].double() @ w2[expert].t()
            if b2 is not None:
                y_nD = y_nD + b2[expert]
            out_TD.index_add_(0, row_n // self.top_k, y_nD * self.scores_N[row_n].double()[:, None])
        return out_TD

    def true_weights(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = [each.double() for each in self.weights.tensors()]
        return tensors + [None] * (6 - len(tensors))


def buffers(workspace: object) -> Iterator[torch.Tensor]:
    """All tensors of a workspace, also those of its parts."""
    for value in vars(workspace).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, torch.Tensor):
                yield item
            elif hasattr(item, "__dict__"):
                yield from buffers(item)


def storage_bytes(workspace: object) -> int:
    storages = [tensor.untyped_storage() for tensor in buffers(workspace)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def poisoned(workspace: Workspace) -> Workspace:
    """As a dirty allocator gives it, but for a constant that the workspace holds."""
    for buffer in buffers(workspace):
        if buffer is not getattr(workspace, "ones_F", None) and buffer.dtype != torch.bool:
            buffer.fill_(math.nan if buffer.is_floating_point() else JUNK_ROW)
    return workspace


@contextmanager
def with_more_programs(problem: Problem, *kernels: str) -> Iterator[None]:
    """Let three times as many programs share the tiles of these kernels."""
    arch = arch_of(DEVICE)
    of_class = shape_class(16, problem.dim, problem.expert_dim, problem.dtype)
    with ExitStack() as stack:
        for kernel in kernels:
            for each in {of_class, "narrow"}:
                before = tuned_config(kernel, arch, each, problem.dtype)
                many = replace(before, programs_per_processor=3 * before.programs_per_processor)
                stack.enter_context(trial(kernel, arch, each, problem.dtype, many))
        yield


def rows_by_load(
    loads: tuple[int, ...], num_tokens: int, top_k: int, random: torch.Generator
) -> torch.Tensor:
    """Rows in order of expert; an expert has a token once at most, and its rows ascend.

    Tokens with the fewest choices taken are dealt first, so that even K = E comes out.
    """
    taken_T = torch.zeros(num_tokens, dtype=torch.long)
    rows = []
    for load in loads:
        shuffled_T = torch.randperm(num_tokens, generator=random)
        dealt = shuffled_T[torch.argsort(taken_T[shuffled_T], stable=True)][:load].sort().values
        assert len(dealt) == load, "an expert has a token at most once"
        rows.append(dealt * top_k + taken_T[dealt])
        taken_T[dealt] += 1
    assert int(taken_T.max()) <= top_k, "the loads need more than top_k choices of a token"
    return torch.cat(rows)


def assert_close(actual: torch.Tensor, truth: torch.Tensor, tolerance: float, name: str) -> None:
    """Within ``tolerance`` of the largest true value; a mismatch prints where and both values."""
    assert actual.shape == truth.shape, name
    if actual.numel() == 0:
        return
    error = (actual.double() - truth.double()).abs()
    error = torch.where(error.isfinite(), error, math.inf)
    scale = max(truth.abs().max().item(), 1e-30)
    worst = int(error.argmax())
    where = [int(index) for index in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert error.flatten()[worst].item() <= tolerance * scale, (
        f"{name}{where}: {actual.flatten()[worst].item()} should be "
        f"{truth.flatten()[worst].item()} within {tolerance * scale:.2e}"
    )
