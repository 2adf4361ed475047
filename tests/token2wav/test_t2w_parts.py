"""Parts of token2wav: the noise, the solver, and the vocoder against transformers'."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.debugging import aot_eager
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAntiAliasedActivation1d,
    Qwen2_5OmniSnakeBeta,
    Qwen2_5OmniToken2WavBigVGANModel,
    RungeKutta4ODESolver,
)

from omnirelay.errors import CheckpointError
from services.families.qwen2_5_omni.token2wav.noise import initial_noise
from services.families.qwen2_5_omni.token2wav.ode import (
    EVALUATIONS_PER_STEP,
    advance,
    evaluation_times,
    time_points,
)
from services.families.qwen2_5_omni.token2wav.vocoder import (
    AntiAliasedActivation,
    Context,
    Vocoder,
    activation,
    contexts,
    samples_per_frame,
)

seeds = st.integers(0, 2**64 - 1)


@given(seed=seeds, total=st.integers(0, 300), bounds=st.tuples(st.integers(0, 300), st.integers(0, 300)))
@settings(deadline=None, max_examples=50)
def test_any_slice_equals_a_draw_from_there(seed, total, bounds):
    a, b = sorted(min(bound, total) for bound in bounds)
    whole = initial_noise(seed, total, 7)
    assert whole.shape == (total, 7)
    assert whole.dtype == torch.float32
    assert torch.equal(whole[a:b], initial_noise(seed, b - a, 7, start=a))
    assert torch.equal(whole[:b], initial_noise(seed, b, 7))
    assert not torch.equal(initial_noise(seed, 10, 7), initial_noise(seed ^ 1, 10, 7))


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


@pytest.fixture(params=["oracle", "other_oracle"])
def vocoder(request) -> Vocoder:
    model = request.getfixturevalue(request.param).model
    vocoder = Vocoder(model.config.bigvgan_config).eval()
    vocoder.bigvgan.load_state_dict(model.code2wav_bigvgan_model.state_dict())
    return vocoder


def mel_of(vocoder: Vocoder, frames: int) -> torch.Tensor:
    mel_dim = vocoder.bigvgan.config.mel_dim
    return torch.randn(frames, mel_dim, generator=torch.Generator().manual_seed(3)) - 3


@torch.no_grad()
@pytest.mark.parametrize("size", [7, 24, 50])
def test_joined_chunks_equal_the_whole(vocoder, size):
    mel = mel_of(vocoder, 150)
    whole = vocoder.bigvgan(mel.T.unsqueeze(0))
    parts = [
        vocoder(mel[:start], mel[start : start + size], mel[start + size :]) for start in range(0, 150, size)
    ]
    assert whole.std() > 0.01
    assert (torch.cat(parts) - whole).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
def test_activation_equals_the_reference(channels, length):
    generator = torch.Generator().manual_seed(length)
    snake = Qwen2_5OmniSnakeBeta(channels)
    for parameter in snake.parameters():
        parameter.normal_(generator=generator)
    values = torch.randn(1, channels, length, generator=generator)
    expected = Qwen2_5OmniAntiAliasedActivation1d(snake)(values)
    assert (expected - values).abs().max() > 1e-3
    ours = AntiAliasedActivation(snake)
    assert (ours(values) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_what_gpus_compile_is_traced_whole_and_once_for_all_lengths():
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(activation, backend=backend, dynamic=True, fullgraph=True)
    for pieces, channels, length in ((2, 8, 50), (4, 16, 120), (8, 4, 33), (1, 8, 240), (4, 8, 70)):
        ours = AntiAliasedActivation(Qwen2_5OmniSnakeBeta(channels))
        values = torch.randn(pieces, channels, length, generator=torch.Generator().manual_seed(length))
        found = compiled(values, *ours._factors(), ours.taps)
        assert (found - ours(values)).abs().max() < 1e-5
    # One more before the taps are seen to be constant, and one where a batch is of one.
    assert len(graphs) <= 3
    torch._dynamo.reset()


def test_a_gpu_s_vocoder_compiles_its_activations(vocoder):
    config = vocoder.bigvgan.config
    for fused in (False, True):
        made = [each for each in Vocoder(config, fused).modules() if isinstance(each, AntiAliasedActivation)]
        assert {each.fused for each in made} == {fused}


def test_the_network_s_activations_are_the_fast_ones(vocoder):
    kinds = [type(module) for module in vocoder.bigvgan.modules()]
    assert kinds.count(AntiAliasedActivation) > 6
    assert Qwen2_5OmniAntiAliasedActivation1d not in kinds


def test_context_reaches_as_far_as_the_network_and_no_further(vocoder):
    """With weights that cannot cancel, a gradient is zero only where nothing depends."""
    left, right = vocoder.context
    bigvgan = Qwen2_5OmniToken2WavBigVGANModel(vocoder.bigvgan.config).double()
    with torch.no_grad():
        for name, tensor in [*bigvgan.named_parameters(), *bigvgan.named_buffers()]:
            if name.endswith(("weight", "filter")):
                tensor.fill_(1 / tensor[0].numel())
            else:
                tensor.fill_(0 if name.endswith("bias") else -2)
        bigvgan.conv_post.weight.mul_(1e-12)
    mel = torch.full((1, bigvgan.config.mel_dim, 180), -3.0, dtype=torch.float64, requires_grad=True)
    middle = 90
    bigvgan(mel)[middle * vocoder.hop : (middle + 1) * vocoder.hop].sum().backward()
    assert mel.grad is not None
    frames = mel.grad.abs().sum(dim=(0, 1)).nonzero().flatten()
    assert (middle - int(frames[0]), int(frames[-1]) - middle) == (left, right)


def test_released_configuration():
    config = Qwen2_5OmniBigVGANConfig()
    assert samples_per_frame(config) == 240
    assert contexts(config)[0] == Context(left=34, right=34)


def test_refuses_kernels_that_stretch_the_waveform():
    config = Qwen2_5OmniBigVGANConfig(upsample_rates=[5], upsample_kernel_sizes=[10])
    with pytest.raises(CheckpointError, match="upsample_kernel_sizes has 10"):
        samples_per_frame(config)


def test_solver_equals_the_reference_for_each_request_at_its_own_times():
    def velocity(time, value):
        return torch.cos(3 * time) * value - time

    sways = [-1.0, None, 0.4]
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    times = torch.stack([time_points(10, sway) for sway in sways])
    evaluated = torch.stack([evaluation_times(points) for points in times])
    batched = values
    for step in range(9):

        def derivative(value, evaluation, first=step * EVALUATIONS_PER_STEP):
            return velocity(evaluated[:, first + evaluation, None], value)

        batched = advance(derivative, batched, (times[:, step + 1] - times[:, step])[:, None])
    for index, _ in enumerate(sways):
        alone = RungeKutta4ODESolver(velocity, values[index]).integrate(times[index])[-1]
        assert torch.equal(batched[index], alone)


def test_time_points_run_from_0_to_1():
    for sway in (None, -1.0, 0.5):
        points = time_points(10, sway)
        assert points[0] == 0
        assert points[-1] == pytest.approx(1, abs=1e-6)
        assert (points[1:] > points[:-1]).all()
