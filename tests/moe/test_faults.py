"""Faulty inputs stop every rank, with the layer, the rank and the token."""

import math
import re
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

from tests.moe.parity import FLOAT32_TOLERANCE, call_relay, errors_against_truth, local_weights
from tests.support.distributed import Job, run_jobs
from tests.support.moe_cases import MoeCase
from titan_relay.moe import (
    ExpertWeights,
    NonFiniteError,
    RelayOptions,
    RelayUsageError,
    relay_moe,
)

CHECKED = RelayOptions(check_finite=True, layer="layers.3")


def _spoil_x(data):
    data.x_TD[4, 1] = math.nan


def _spoil_score(data):
    data.scores_TK[2, 0] = math.inf


def _id_too_large(data):
    data.ids_TK[3, 1] = 12


def _negative_id(data):
    data.ids_TK[5, 0] = -1


def _repeat_id(data):
    data.ids_TK[6] = data.ids_TK[6, 0]


FAULTS = [
    (_spoil_x, NonFiniteError, "'layers.3': x_TD has a NaN or an infinity at token 4 on rank {}"),
    (_spoil_score, NonFiniteError, "'layers.3': scores_TK has a NaN .* token 2 on rank {}"),
    (_id_too_large, RelayUsageError, r"expert_ids_TK\[3, 1\] = 12 on rank {} .*in \[0, 12\)"),
    (_negative_id, RelayUsageError, r"expert_ids_TK\[5, 0\] = -1 on rank {}"),
    (_repeat_id, RelayUsageError, r"expert_ids_TK\[6, 1\] = \d+ on rank {} .*is repeated"),
]


def _run(case, rank, spoil, group, options):
    data = case.data(rank)
    if spoil is not None:
        spoil(data)
    weights = [weight.detach() for weight in local_weights(case, rank)]
    return call_relay([data.x_TD, data.scores_TK, data.ids_TK, *weights], group, options)


@pytest.mark.parametrize(("spoil", "kind", "message"), FAULTS)
def test_on_one_rank(spoil, kind, message):
    with pytest.raises(kind, match=message.format(0)):
        _run(MoeCase(1), 0, spoil, None, CHECKED)


@pytest.mark.parametrize("spoil", [_id_too_large, _negative_id])
def test_ids_out_of_range_are_found_without_being_asked_for(spoil):
    with pytest.raises(RelayUsageError, match="ids must be in"):
        _run(MoeCase(1), 0, spoil, None, RelayOptions())


def _narrow_x(data):
    data.x_TD = data.x_TD[:, :-1]


def _half_x(data):
    data.x_TD = data.x_TD.bfloat16()


REFUSED_ELSEWHERE = r"inputs of .* ranks \[1\] were refused"
REFUSED = [(_narrow_x, r"w1_gFD has shape"), (_half_x, r"w1_gFD has dtype torch\.float32")]
DIFFERENT = [
    (
        {"circulate": "tokens"},
        r"RelayOptions\.circulate must .* by rank: .*'auto', 'tokens', 'auto'",
    ),
    ({"layer": "other"}, r"RelayOptions\.layer must .* by rank: .*'layers.3', 'other', 'layers.3'"),
]


CASE = MoeCase(3)
# By name of what is wrong on rank 1: the change, its options, the error, and what rank 1 and the
# others are told.
ON_ONE_RANK = {
    spoil.__name__: (spoil, CHECKED, kind, message.format(1), message.format(1))
    for spoil, kind, message in FAULTS
}
ON_ONE_RANK |= {
    spoil.__name__: (spoil, CHECKED, RelayUsageError, message, REFUSED_ELSEWHERE)
    for spoil, message in REFUSED
}
ON_ONE_RANK |= {
    str(keys): (None, replace(CHECKED, **keys), RelayUsageError, message, message)
    for keys, message in DIFFERENT
}


def told(group, name):
    """The error that this rank gets."""
    rank = dist.get_rank(group)
    spoil, options, *_ = ON_ONE_RANK[name] if rank == 1 else (None, CHECKED)
    try:
        _run(CASE, rank, spoil, group, options)
    except (NonFiniteError, RelayUsageError) as error:
        return type(error), str(error)
    return None, ""


@pytest.fixture(scope="module")
def results():
    jobs = {name: Job(3, told, (name,)) for name in ON_ONE_RANK}
    return run_jobs({**jobs, "afterwards": Job(3, errors_against_truth, (CASE, CHECKED))}, 3)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_fault_on_one_rank_stops_every_rank(name, results):
    _, _, kind, of_rank_1, of_others = ON_ONE_RANK[name]
    for rank, (error, message) in enumerate(results[name]):
        assert error is kind
        assert re.search(of_rank_1 if rank == 1 else of_others, message)


def test_the_ring_works_after_every_fault(results):
    assert all(max(errors.values()) < FLOAT32_TOLERANCE for errors in results["afterwards"])


X = torch.zeros(4, 8)
SCORES = torch.zeros(4, 2)
IDS = torch.zeros(4, 2, dtype=torch.int64)
WEIGHTS = W1, W2, W3 = torch.zeros(3, 6, 8), torch.zeros(3, 8, 6), torch.zeros(3, 6, 8)


@pytest.mark.parametrize(
    ("tokens", "weights", "message"),
    [
        ((X[0], SCORES, IDS), WEIGHTS, "and weights.w1_gFD have 1, 2 and 3 dimensions"),
        ((X, SCORES[:3], IDS), WEIGHTS, r"scores_TK has shape \(3, 2\); it must be \(4, 2\)"),
        ((X, SCORES, IDS[:, :1]), WEIGHTS, r"expert_ids_TK has shape \(4, 1\)"),
        ((X, SCORES, IDS), (W1, W1, W3), r"w2_gDF has shape \(3, 6, 8\); it must be \(3, 8, 6\)"),
        ((X, SCORES, IDS), (W1, W2, W3[:2]), r"w3_gFD has shape \(2, 6, 8\)"),
        ((X.double(), SCORES, IDS), WEIGHTS, r"w1_gFD has dtype torch.float32; it must be that"),
        ((X, SCORES, IDS.float()), WEIGHTS, "expert_ids_TK has dtype torch.float32"),
        ((X, IDS, IDS), WEIGHTS, "both must be floating"),
        ((X.long(), SCORES, IDS), WEIGHTS, "both must be floating"),
        ((X, SCORES, IDS), ([W1], W2, W3), "weights.w1_gFD is a list, not a tensor"),
        ((X, SCORES, IDS), (*WEIGHTS, W1[..., 0]), r"weights.b2_gD, weights.b3_gF must be given"),
        (
            (X, SCORES, IDS),
            (*WEIGHTS, W1[..., 0], W1[..., 0], W1[..., 0]),
            r"weights.b2_gD has shape \(3, 6\); it must be \(3, 8\)",
        ),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(tokens, weights, message):
    with pytest.raises(RelayUsageError, match=message):
        relay_moe(*tokens, ExpertWeights(*weights))


def test_bare_tensors_are_no_weights():
    with pytest.raises(RelayUsageError, match=r"Tensor; it must be ExpertWeights\(w1_eFD"):
        relay_moe(X, SCORES, IDS, W1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"circulate": "weights"}, 'circulate = "weights": must be "auto", "experts" or "tokens"'),
        ({"num_slices": 0}, 'num_slices = 0: must be an integer of at least 1, or "auto"'),
        ({"num_slices": True}, "num_slices = true: must be"),
        ({"num_slices": None}, 'num_slices = "none": must be'),
        ({"max_rows_per_step": -3}, "max_rows_per_step = -3: must be"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank = 0: must be an integer of at least 1"),
        ({"max_tokens_per_rank": "auto"}, 'max_tokens_per_rank = "auto": must be an integer'),
        ({"deterministic": "yes"}, 'deterministic = "yes": must be true or false'),
        ({"check_finite": 1}, "check_finite = 1: must be true or false"),
        ({"layer": 3}, "layer = 3: must be a string"),
        ({"grad_dtype": "fp8"}, 'grad_dtype = "fp8": must be "float32", '),
        ({"kernels": "cuda"}, 'kernels = "cuda": must be "auto", "triton" or "torch"'),
    ],
)
def test_wrong_options_are_named(wrong, message):
    with pytest.raises(RelayUsageError, match=message):
        RelayOptions(**wrong)


DECLARED = [each for each in fields(RelayOptions) if "rule" in each.metadata]


@pytest.mark.parametrize("declared", DECLARED, ids=lambda each: each.name)
def test_every_declared_option_has_its_type_and_range(declared):
    wrong = [object()]
    if declared.metadata["rule"].at_least is not None:
        wrong.append(declared.metadata["rule"].at_least - 1)
    for value in wrong:
        with pytest.raises(RelayUsageError, match=f"RelayOptions: {declared.name} = "):
            RelayOptions(**{declared.name: value})


def test_kernels_that_cannot_run_are_refused():
    inputs = [X.double(), SCORES, IDS, ExpertWeights(*(weight.double() for weight in WEIGHTS))]
    with pytest.raises(RelayUsageError, match=r"it does not compute in torch\.float64"):
        relay_moe(*inputs, options=RelayOptions(kernels="triton"))
