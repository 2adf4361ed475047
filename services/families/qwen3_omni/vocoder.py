"""Code2wav of Qwen3-Omni, piece by piece: what is made of a stream does not depend on how it is cut.

Every layer is causal but the transposed convolutions of the decoder, which cut off as much behind their
input as before it: the last samples of a frame need the next one.  Here each layer keeps the end of what it
was given, so that a piece goes on where the last one stopped; nothing is computed twice, and no context is
guessed.

Reference: transformers' ``Qwen3OmniMoeCode2Wav``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2Wav,
)


@dataclass
class Stream:
    """Where a stream of codec frames stands, and what each layer has kept of it."""

    frames: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)


class StreamedConvolution(Qwen3OmniMoeCausalConvNet):
    """A causal convolution that keeps the inputs which the next piece needs, [pieces, channels, time]."""

    kept: torch.Tensor | None = None

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """[pieces, channels, time] -> the same time, none of none."""
        kept = self.kept
        if kept is None:
            kept = hidden_state.new_zeros(*hidden_state.shape[:2], self.padding)
        known = torch.cat([kept, hidden_state], dim=2)
        self.kept = known[:, :, known.shape[2] - self.padding :]
        if not hidden_state.shape[2]:
            return hidden_state.new_empty(hidden_state.shape[0], self.conv.out_channels, 0)
        output: torch.Tensor = self.conv(known)
        return output


class StreamedUpsampling(Qwen3OmniMoeCausalTransConvNet):
    """A transposed convolution that keeps its last input: what it makes of two inputs lies between them."""

    kept: torch.Tensor | None = None

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        """[pieces, channels, time] -> [pieces, channels, samples]; the first input of a stream makes none."""
        if not self.left_pad:
            self.kept = hidden_state[:, :, :0]
            output: torch.Tensor = self.conv(hidden_state)
            return output
        known = hidden_state if self.kept is None else torch.cat([self.kept, hidden_state], dim=2)
        self.kept = known[:, :, -1:]
        if known.shape[2] < 2:
            return hidden_state.new_empty(hidden_state.shape[0], self.conv.out_channels, 0)
        overlapping: torch.Tensor = self.conv(known)
        return overlapping[:, :, self.left_pad : -self.right_pad]


class StreamedKeyValues:
    """The keys and values of the last ``past`` positions: what an attention of a sliding window needs.

    It takes the place of transformers' ``Cache``, of which the layers call ``update`` only.
    """

    def __init__(self, layers: int, past: int) -> None:
        self.kept: list[torch.Tensor | None] = [None] * layers
        self._past = past

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``[pieces, heads, new, size]`` each; gives ``[pieces, heads, past + new, size]`` each."""
        new, kept = torch.stack([key, value], dim=1), self.kept[layer]
        if kept is None:
            kept = new.new_zeros(*new.shape[:3], self._past, new.shape[4])
        known = torch.cat([kept, new], dim=3)
        self.kept[layer] = known[:, :, :, known.shape[3] - self._past :]
        keys, values = known.unbind(1)
        return keys, values


class StreamedCode2Wav(nn.Module):
    """Makes the next frames of several streams audio; its parameters are the reference's."""

    def __init__(self, config: Qwen3OmniMoeCode2WavConfig) -> None:
        super().__init__()
        self.config = config
        self.code2wav = Qwen3OmniMoeCode2Wav(config)
        self._layers: list[StreamedConvolution | StreamedUpsampling] = []
        for parent in list(self.code2wav.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, Qwen3OmniMoeCausalConvNet | Qwen3OmniMoeCausalTransConvNet):
                    self._layers.append(_streamed(layer.conv))
                    parent.add_module(name, self._layers[-1])

    def forward(self, streams: Sequence[Stream], codes: torch.Tensor) -> torch.Tensor:
        """Audio ``[streams, samples]``, in [-1, 1], of codec ids int64 ``[streams, frames, groups]``.

        The streams, all at their start or all behind it, go on behind these frames.
        """
        model = self.code2wav
        keys_and_values = StreamedKeyValues(self.config.num_hidden_layers, self.config.sliding_window - 1)
        self._resume(streams, keys_and_values)
        hidden = model.code_embedding(codes.transpose(1, 2) + model.code_offset).mean(1)
        positions, mask = self._window(streams, codes)
        hidden = model.pre_transformer(
            inputs_embeds=hidden,
            attention_mask={"sliding_attention": mask},
            position_ids=positions,
            past_key_values=keys_and_values,
        ).last_hidden_state.transpose(1, 2)
        for block in [each for blocks in model.upsample for each in blocks] + list(model.decoder):
            hidden = block(hidden)
        self._suspend(streams, keys_and_values, codes.shape[1])
        return hidden.squeeze(1).clamp(min=-1, max=1)

    def _window(self, streams: Sequence[Stream], codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[streams, frames]``, and which of those before and among them each sees."""
        past = self.config.sliding_window - 1
        starts = torch.tensor([stream.frames for stream in streams], device=codes.device).unsqueeze(1)
        known = starts + torch.arange(-past, codes.shape[1], device=codes.device)
        new = known[:, past:]
        age = new.unsqueeze(2) - known.unsqueeze(1)
        return new, ((age >= 0) & (age <= past) & (known >= 0).unsqueeze(1)).unsqueeze(1)

    def _resume(self, streams: Sequence[Stream], keys_and_values: StreamedKeyValues) -> None:
        """Give the layers what they have kept of these streams."""
        kept = [torch.stack(each) for each in zip(*(stream.kept for stream in streams), strict=True)]
        count = len(keys_and_values.kept)
        begun = bool(kept)
        keys_and_values.kept = list(kept[:count]) if begun else [None] * count
        for at, layer in enumerate(self._layers):
            layer.kept = kept[count + at] if begun else None

    def _suspend(self, streams: Sequence[Stream], keys_and_values: StreamedKeyValues, frames: int) -> None:
        """Take from the layers what the streams need later."""
        kept = [*keys_and_values.kept, *(layer.kept for layer in self._layers)]
        for index, stream in enumerate(streams):
            stream.frames += frames
            # Copies: a view would keep what it is a part of.
            stream.kept = [each[index].clone() for each in kept if each is not None]


def _streamed(conv: nn.Conv1d | nn.ConvTranspose1d) -> StreamedConvolution | StreamedUpsampling:
    """A layer of the same shape, without weights."""
    sizes = conv.in_channels, conv.out_channels, conv.kernel_size[0]
    if isinstance(conv, nn.ConvTranspose1d):
        return StreamedUpsampling(*sizes, conv.stride[0])
    return StreamedConvolution(*sizes, conv.dilation[0], conv.stride[0], conv.groups)
