"""Triton's interpreter runs the Triton kernels on CPU tensors, and the tests compare them with definitions in float64.

    TRITON_INTERPRET=1 python -m pytest tests/interpreted_kernels.py

test_kernels.py runs this file in a process of its own, because the switch must be set before triton is imported, and it
breaks compiling. All uninitialised memory holds NaN here."""
import math

import pytest
import torch

import kernels
from kernel_cases import (ATTENDS, INTERPRETED, SCANS, SPLITS, assert_close, attend_case, compare_attend, compare_own,
                          compare_scan, few, outputs_and_gradients)
from test_kernels import (test_any_strides, test_attend_is_the_definition, test_one_query_in_splits,
                          test_own_pairs_are_one_more_key, test_scan_is_the_loop, test_states_are_float32)
from test_rt import test_pieces_in_triton_are_the_plain_ones, test_schedules_agree_on_the_kernels

assert INTERPRETED, "set TRITON_INTERPRET=1"
torch.use_deterministic_algorithms(True)        # torch.empty then gives NaN, which shows what a kernel forgets to write
assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("number", few(range(6), 2))
def test_in_16_bits(number):
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    compare_attend(kernels.attend_by_position, *attend_case(number, *ATTENDS[6 * number], dtype), 1e-2)
    compare_own(*attend_case(number, *ATTENDS[6 * number], dtype), 1e-2)
    compare_scan(kernels.scan, *SCANS[3 * number], 1e-2, dtype)
    if number < len(SPLITS):
        test_one_query_in_splits(number, "cpu", dtype, 1e-2)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_fully_masked_tiles_are_not_loaded(kind):
    """There are 300 positions, and the window is 40. Queries 200 to 299 attend to no key of the tiles 0 to 127, and no
    query of the tiles from 192 on attends to keys 0 to 63. NaN there, also in the incoming gradients, reaches neither
    results nor gradients."""
    at = torch.arange(300, dtype=torch.int32)
    mask = (None, None, None, 40) if kind == "plain" else (at, at, None, 40)
    q, k, v = (torch.randn(1, 1, 300, 16) for _ in range(3))
    do, dlse = torch.ones_like(q), torch.ones(1, 1, 300)
    whole = outputs_and_gradients(kernels.attend_by_position, (q, k, v), mask, (do, dlse))
    k_nan, v_nan = (x.index_fill(2, torch.arange(128), math.nan) for x in (k, v))
    found = outputs_and_gradients(kernels.attend_by_position, (q, k_nan, v_nan), mask, (do, dlse))
    assert_close(*[[x[:, :, 256:] for x in xs[:3]] for xs in (found, whole)], 1e-6, "out lse dq")
    q, do = (x.index_fill(2, torch.arange(192, 300), math.nan) for x in (q, do))
    found = outputs_and_gradients(kernels.attend_by_position, (q, k, v), mask, (do, dlse))
    assert_close(*[[x[:, :, :64] for x in xs[3:]] for xs in (found, whole)], 1e-6, "dk dv")
