"""Checkpoints with random weights, and transformers' own answers for them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel

from services.families.qwen2_5_omni.token2wav.conditioning import Conditioner
from services.families.qwen2_5_omni.token2wav.noise import initial_noise
from services.families.qwen2_5_omni.token2wav.synthesizer import SolverSynthesizer, SolverWork
from services.token2wav.chunks import AudioStream, SynthesisChunk
from services.token2wav.engine import SynthesisEngine
from shared.config import Precision, SynthesisConfig, SynthesisEngineConfig, Token2WavConfig
from shared.messages import Sampling, SpeechSettings

NUM_EMBEDS = 64
TOLERANCE = 1e-4
MAX_BATCH_FRAMES = 500
MAX_VOCODER_FRAMES = 90
"""Of the fixture ``engine``; no multiple of a block."""


@dataclass
class Oracle:
    """A checkpoint on disk and the reference model with the same weights."""

    path: Path
    model: Qwen2_5OmniToken2WavModel
    speakers: dict[str, dict[str, torch.Tensor | int]]

    @property
    def block_codes(self) -> int:
        config = self.model.config.dit_config
        return config.block_size // config.repeats

    def codes(self, length: int, seed: int = 0) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed % 1000)
        return tuple(torch.randint(0, NUM_EMBEDS + 1, (length,), generator=generator).tolist())

    def chunk(self, length: int, seed: int = 0, **changes) -> SynthesisChunk:
        frames = length * self.model.config.dit_config.repeats
        values = {
            "codes": self.codes(length, seed),
            "start": 0,
            "target_end": frames,
            "seed": seed,
            "speaker": "Ethan",
            "is_last": True,
        }
        return SynthesisChunk(**(values | changes))

    @torch.no_grad()
    def waveform(self, chunk: SynthesisChunk, **solver) -> torch.Tensor:
        settings = SynthesisConfig(**solver)
        voice = self.speakers[chunk.speaker]
        config = self.model.config.dit_config
        noise = initial_noise(chunk.seed, len(chunk.codes) * config.repeats, config.mel_dim)
        with mock.patch("torch.randn", return_value=noise.unsqueeze(0)):
            return self.model(
                torch.tensor([chunk.codes]),
                conditioning=voice["cond"],
                reference_mel=voice["ref_mel"],
                num_steps=settings.time_points,
                guidance_scale=settings.guidance_scale,
                sway_coefficient=settings.sway_coefficient,
            )

    def check(self, results: Mapping[str, torch.Tensor | None], chunks: Mapping[str, SynthesisChunk]) -> None:
        """What was made of some chunks is the reference's."""
        for name, chunk in chunks.items():
            result = results[name]
            assert result is not None
            assert (result - self.waveform(chunk)).abs().max() < TOLERANCE, name


def make_checkpoint(path: Path, dit: dict[str, Any], bigvgan: dict[str, Any], seed: int) -> Oracle:
    """Save random weights, scaled so that every layer matters and the waveform is of natural size."""
    torch.manual_seed(seed)
    config = Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=bigvgan)
    model = Qwen2_5OmniToken2WavModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.linear.bias", "norm_out.linear.bias")):
                # Gates of natural size: else no layer would change anything.
                parameter.normal_(0, 0.6)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
            elif name.endswith(("alpha", "beta")):
                parameter.normal_(0, 0.1)
            elif "codec_embed" in name:
                parameter.normal_(0, 1)
            elif ".attn." in name:
                parameter.normal_(0, 2 / parameter.shape[1] ** 0.5)
            else:
                fan_in = parameter[0].numel()
                parameter.normal_(0, 0.9 / fan_in**0.5)
        model.code2wav_bigvgan_model.conv_post.weight.mul_(0.25)
    # As in a real checkpoint: the whole model's configuration, and tensors of other stages among ours.
    whole = Qwen2_5OmniConfig(token2wav_config=config.to_dict(), architectures=["Qwen2_5OmniModel"])
    whole.save_pretrained(path)
    tensors = {f"token2wav.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors | {"thinker.lm_head.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed % 1000)
    mel_dim, emb_dim = config.dit_config.mel_dim, config.dit_config.enc_emb_dim
    speakers: dict[str, dict[str, torch.Tensor | int]] = {
        name: {
            "cond": torch.randn(1, emb_dim, generator=generator),
            "ref_mel": torch.randn(1, frames, mel_dim, generator=generator) - 3,
            "bos_token": 10 + frames,
        }
        for name, frames in (("Chelsie", 57), ("Ethan", 80))
    }
    torch.save(speakers, path / "spk_dict.pt")
    return Oracle(path, model, speakers)


SMALL_DIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
    "num_embeds": NUM_EMBEDS,
    "block_size": 24,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "mel_dim": 80,
    "enc_emb_dim": 16,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 2,
    "enc_se_channels": 8,
    "max_position_embeddings": 400,
}
# Another block size and repeat, a layer that sees both neighbours, an inner width other than hidden.
OTHER_DIT: dict[str, Any] = SMALL_DIT | {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "head_dim": 8,
    "block_size": 9,
    "repeats": 3,
    "ff_mult": 1,
    "look_ahead_layers": [1, 2],
    "look_backward_layers": [1],
    "mel_dim": 20,
    "enc_res2net_scale": 4,
    "enc_kernel_sizes": [3, 3, 3, 3, 1],
}
SMALL_BIGVGAN: dict[str, Any] = {"upsample_initial_channel": 64}
OTHER_BIGVGAN: dict[str, Any] = {
    "mel_dim": 20,
    "upsample_initial_channel": 32,
    "upsample_rates": [4, 2, 2],
    "upsample_kernel_sizes": [8, 6, 4],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 2, 3], [1, 3, 5]],
}


def config_of(
    max_batch_frames: int, max_vocoder_frames: int = 512, batch: int = 8, precision: Precision = "exact"
) -> Token2WavConfig:
    """A stage whose steps take so much, and in which no stream waits for another."""
    return Token2WavConfig(
        http=None,
        engine=SynthesisEngineConfig(max_num_seqs=batch),
        playback_margin_s=0.0,
        synthesis=SynthesisConfig(
            max_batch_frames=max_batch_frames, max_vocoder_frames=max_vocoder_frames, precision=precision
        ),
    )


def run_all(engine: SynthesisEngine) -> dict[str, torch.Tensor]:
    """Step until idle; every chunk must have succeeded."""
    results = {}
    while engine.has_work:
        for outcome in engine.step():
            if outcome.error is not None:
                raise outcome.error
            assert outcome.waveform is not None
            results[outcome.request_id] = outcome.waveform
    return results


def runner_of(engine: SynthesisEngine) -> Any:
    """vLLM's, of the only worker."""
    return engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def pooler_of(engine: SynthesisEngine) -> Any:
    """The model's part that makes audio."""
    return runner_of(engine).model.pooler


@contextmanager
def solving(engine: SynthesisEngine, **changes) -> Iterator[None]:
    """Let an engine's solver have other settings."""
    pooler = pooler_of(engine)
    own = pooler.synthesizer
    config = own._work.config.model_copy(update=changes)
    work = SolverWork(own._work.geometry, config)
    conditioner = Conditioner(own._dit, own._conditioner._speakers, config)
    made = SolverSynthesizer(own._dit, own._vocoder, conditioner, work)
    with (
        mock.patch.object(pooler, "_of_model", (made,)),
        mock.patch.object(own._dit, "guidance_scale", config.guidance_scale),
        mock.patch.object(engine, "_work", work),
        mock.patch.object(engine.scheduler, "work", work),
    ):
        yield


def spoken(seed: int, sizes: Sequence[int] = (), speaker: str = "Ethan") -> SpeechSettings:
    """What a stream is to sound like, and how it is cut."""
    sampling = Sampling(max_tokens=1)
    return SpeechSettings(speaker=speaker, sampling=sampling, seed=seed, chunk_frames=list(sizes))


def stream_of(
    engine: SynthesisEngine, codes: Sequence[int], seed: int, sizes: Sequence[int] = (), max_blocks: int = 8
) -> AudioStream:
    """A stream whose ids are all there."""
    config = SynthesisConfig(max_chunk_blocks=max_blocks)
    stream = AudioStream(spoken(seed, sizes), config, engine.geometry)
    stream.extend(codes)
    stream.end()
    return stream


def play(
    engine: SynthesisEngine, streams: Mapping[int, AudioStream], starts: Mapping[int, int]
) -> dict[int, torch.Tensor]:
    """Make streams beside each other, each from an engine's step on."""
    parts: dict[int, list[torch.Tensor]] = {number: [] for number in streams}
    step = 0
    while any(not stream.finished for stream in streams.values()):
        for number, stream in streams.items():
            if step >= starts[number] and (chunk := stream.next_chunk()) is not None:
                engine.submit_chunk(str(number), chunk)
        step += 1
        for outcome in engine.step() if engine.has_work else ():
            assert outcome.waveform is not None, outcome.error
            number = int(outcome.request_id)
            assert streams[number].accept_chunk()
            parts[number].append(outcome.waveform)
    run_all(engine)
    return {number: torch.cat(made) for number, made in parts.items()}


@contextmanager
def counting(target: object, method: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of the calls of a method, which still does its work."""
    calls: list[tuple[Any, ...]] = []
    original: Callable[..., Any] = getattr(target, method)

    def record(*arguments, **options):
        calls.append(arguments)
        return original(*arguments, **options)

    with mock.patch.object(target, method, record):
        yield calls
