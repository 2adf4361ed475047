import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import InvalidRequestError
from services.families.qwen2_5_omni.token2wav.noise import initial_noise

seeds = st.integers(0, 2**64 - 1)


@given(seed=seeds, total=st.integers(0, 300), bounds=st.tuples(st.integers(0, 300), st.integers(0, 300)))
@settings(deadline=None, max_examples=50)
def test_any_slice_equals_a_draw_from_there(seed, total, bounds):
    a, b = sorted(min(bound, total) for bound in bounds)
    whole = initial_noise(seed, total, 7)
    assert whole.shape == (total, 7)
    assert whole.dtype == torch.float32
    assert torch.equal(whole[a:b], initial_noise(seed, b - a, 7, start=a))


@given(seed=seeds)
@settings(deadline=None, max_examples=20)
def test_prefix_does_not_depend_on_length_and_seeds_differ(seed):
    assert torch.equal(initial_noise(seed, 10, 80), initial_noise(seed, 500, 80)[:10])
    assert not torch.equal(initial_noise(seed, 10, 80), initial_noise(seed ^ 1, 10, 80))


def test_far_positions_cost_no_more_than_near_ones_and_are_finite():
    assert torch.isfinite(initial_noise(3, 5, 80, start=2**40)).all()


def test_is_standard_normal_without_correlation():
    noise = initial_noise(12345, 20_000, 20)
    assert abs(noise.mean().item()) < 0.01
    assert abs(noise.std().item() - 1) < 0.01
    assert abs((noise**4).mean().item() - 3) < 0.05
    correlation = np.corrcoef(noise.numpy().T)
    assert np.abs(correlation - np.eye(20)).max() < 0.04
    assert abs((noise[1:] * noise[:-1]).mean().item()) < 0.01


def test_values_never_change():
    expected = torch.tensor(
        [[-0.57110995054245, 0.2650510370731354], [-0.06514742970466614, 1.823506236076355]]
    )
    assert torch.equal(initial_noise(42, 2, 2), expected)


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (2**64, 1, 1), (0, -1, 1), (0, 1, 0), (0, 1, 1, -1)])
def test_refuses_arguments_out_of_range(arguments):
    with pytest.raises(InvalidRequestError):
        initial_noise(*arguments)
