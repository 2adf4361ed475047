"""``python -m benchmarks.gpu.reference STAGE MODEL WORK DEVICE`` asks transformers the same.

Its own ``generate`` runs, but is made to take OmniRelay's tokens, so that a near tie does not make all that
follows incomparable.  What it would have taken is noted: a token is right if it is the likeliest, or in
bfloat16 so close to it that rounding decides.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import msgspec
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LogitsProcessor

from benchmarks.gpu.rehearsal import (
    AT_ONCE,
    PROMPT_TOKENS,
    SEED,
    SPEAKER,
    StageRun,
    finished,
    output_of,
    prompt_of,
)
from benchmarks.measure.oracle import keep_talker_mask
from services.families.qwen2_5_omni.token2wav.noise import initial_noise
from services.families.qwen2_5_omni.voices import Speaker, load_speakers
from shared.checkpoints import weight_files
from shared.messages import StageName

TOKEN_LIMITS: Final = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""How far a token may be behind the likeliest, in standard deviations of the logits."""
ROW_LIMITS: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""How far rows may be off, as a share of their norm."""
WAVEFORM_LIMIT: Final = 1e-4


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Something of OmniRelay's beside transformers'.

    Attributes:
        what: What was compared, and how the difference is measured.
        count: How many tokens, numbers or samples.
        equal: How many are equal to the last bit.
        difference: The largest difference; none if they cannot be compared: another shape, or no numbers.
        limit: The largest that passes.
    """

    what: str
    count: int
    equal: int
    difference: float | None
    limit: float

    @property
    def passed(self) -> bool:
        """Whether it is right."""
        return self.difference is not None and self.difference <= self.limit


class ReferenceRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a process with transformers ran, and what it found."""

    run: StageRun
    comparisons: list[Comparison]


class Forced(LogitsProcessor):
    """Takes given tokens, and notes how far each is behind the likeliest.

    Args:
        tokens: The tokens.
        drawable: Ids below are in question.
    """

    def __init__(self, tokens: list[int], drawable: int) -> None:
        self.behind: list[float] = []
        self._tokens = tokens
        self._drawable = drawable

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take the next token."""
        token = self._tokens[len(self.behind)]
        considered = scores[0, : self._drawable].float()
        spread = considered[considered.isfinite()].std()
        self.behind.append(float((considered.max() - considered[token]) / spread))
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = 0.0
        return forced

    def comparison(self, dtype: torch.dtype) -> Comparison:
        """How right the tokens were."""
        name = str(dtype).removeprefix("torch.")
        return Comparison(
            what=f"tokens, {name}: behind the likeliest, in deviations of the logits",
            count=len(self.behind),
            equal=sum(each == 0.0 for each in self.behind),
            difference=max(self.behind),
            limit=TOKEN_LIMITS[dtype],
        )


def main(stage: StageName, model: Path, work: Path, device: str) -> ReferenceRun:
    """Load one part of the model, and compare."""
    # As the reference computes it, not as TF32.
    torch.backends.cudnn.allow_tf32 = False
    config = transformers.Qwen2_5OmniConfig.from_pretrained(model)
    started = time.perf_counter()
    if stage == "token2wav":
        loaded_model: Any = load_token2wav(config.token2wav_config, model)
    else:
        kind = getattr(transformers, f"Qwen2_5Omni{stage.capitalize()}ForConditionalGeneration")
        part = getattr(config, f"{stage}_config")
        loaded_model = kind.from_pretrained(model, config=part, dtype=config.dtype)
    loaded_model = loaded_model.eval().to(device)
    loaded = time.perf_counter()
    compare = {"thinker": _thinker, "talker": _talker, "token2wav": _token2wav}[stage]
    with torch.inference_mode():
        comparisons = [
            msgspec.structs.replace(each, what=f"{kind}: {each.what}")
            for kind in AT_ONCE
            for each in compare(loaded_model, config, model, output_of(work, stage, kind))
        ]
    run = finished(stage, "transformers", started, loaded)
    return ReferenceRun(run=run, comparisons=comparisons)


def load_token2wav(config: Any, model: Path) -> Any:
    """Load it by its tensors' names; ``from_pretrained`` finds this part only as one of the whole model."""
    token2wav = transformers.Qwen2_5OmniToken2WavModel(config).float()
    prefix = "token2wav."
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(model):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  (no mapping)
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    token2wav.load_state_dict(tensors)
    return token2wav


def _thinker(thinker: Any, config: Any, model: Path, output: Path) -> list[Comparison]:
    made = load_file(output)
    tokens: list[int] = made["tokens"].tolist()
    vocabulary = thinker.config.pad_token_id
    prompt = torch.tensor([prompt_of(vocabulary)], device=thinker.device)
    forced = Forced(tokens, config.thinker_config.text_config.vocab_size)
    result = thinker.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(tokens),
        min_new_tokens=len(tokens),
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
        logits_processor=[forced],
    )
    embedded = torch.cat([step[0] for step in result.hidden_states], dim=1)[0]
    last = torch.cat([step[-1] for step in result.hidden_states], dim=1)[0]
    computed = embedded + last
    talker = config.talker_config
    bos = load_speakers(model)[SPEAKER].bos_token
    extra = [bos, talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
    bos_row, end_row, pad_row = thinker.get_input_embeddings()(torch.tensor([extra], device=thinker.device))[
        0
    ].split(1)
    # As transformers' generate puts the talker's input together.
    rows = torch.cat([computed[:PROMPT_TOKENS], bos_row, computed[PROMPT_TOKENS:], end_row, pad_row]).cpu()
    ours = made["rows"]
    name = str(rows.dtype).removeprefix("torch.")
    return [
        forced.comparison(rows.dtype),
        Comparison(
            what=f"conditioning rows, {name}: share of the norm, worst row",
            count=rows.numel(),
            equal=int((rows == ours).sum()),
            difference=_off(ours, rows),
            limit=ROW_LIMITS[rows.dtype],
        ),
    ]


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    if ours.shape != theirs.shape:
        return None
    ours, theirs = ours.float(), theirs.float()
    return _finite(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if value.isfinite() else None


def _talker(talker: Any, config: Any, model: Path, output: Path) -> list[Comparison]:
    given = load_file(output_of(output.parent, "thinker"))
    codes: list[int] = load_file(output)["codes"].tolist()
    keep_talker_mask(SimpleNamespace(talker=talker))
    rows = given["rows"].unsqueeze(0).to(talker.device)
    prompt = prompt_of(config.thinker_config.pad_token_id)
    text = [*prompt, load_speakers(model)[SPEAKER].bos_token, int(given["tokens"][0])]
    ids = [talker.codec_mask_token] * len(prompt) + [talker.codec_pad_token, talker.codec_bos_token]
    forced = Forced(codes, config.token2wav_config.dit_config.num_embeds)
    talker.generate(
        input_ids=torch.tensor([ids], device=talker.device),
        input_text_ids=torch.tensor([text], device=talker.device),
        # The talker adds to its first argument in place.
        inputs_embeds=rows[:, : len(ids)].clone(),
        thinker_reply_part=rows[:, len(ids) :],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=talker.device),
        suppress_tokens=[talker.codec_bos_token],
        max_new_tokens=len(codes),
        do_sample=False,
        logits_processor=[forced],
        # None of the forced tokens ends it.
        eos_token_id=config.talker_config.tts_codec_end_token_id,
    )
    return [forced.comparison(talker.dtype)]


def _token2wav(token2wav: Any, config: Any, model: Path, output: Path) -> list[Comparison]:
    codes = load_file(output_of(output.parent, "talker"))["codes"]
    ours = load_file(output)["samples"]
    theirs = sound_of(token2wav, config.token2wav_config, codes, load_speakers(model)[SPEAKER]).cpu()
    same = ours.shape == theirs.shape
    return [
        Comparison(
            what="samples, float32: absolute, of full scale",
            count=theirs.numel(),
            equal=int((ours == theirs).sum()) if same else 0,
            difference=_finite((ours - theirs).abs().max()) if same else None,
            limit=WAVEFORM_LIMIT,
        )
    ]


def sound_of(token2wav: Any, config: Any, codes: torch.Tensor, speaker: Speaker) -> torch.Tensor:
    """What transformers makes of codec tokens, from the noise that the seed gives: float32 ``[samples]``."""
    dit, device = config.dit_config, token2wav.device
    noise = initial_noise(SEED, len(codes) * dit.repeats, dit.mel_dim).unsqueeze(0).to(device)
    # transformers draws its own from an unseeded generator.
    with mock.patch.object(torch, "randn", return_value=noise):
        sound: torch.Tensor = token2wav(
            codes.unsqueeze(0).to(device),
            conditioning=speaker.cond.to(device),
            reference_mel=speaker.ref_mel.to(device),
        )
    return sound.reshape(-1)


if __name__ == "__main__":
    from shared.vllm.torchvision_compat import declare_missing_operators

    declare_missing_operators()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = main(msgspec.convert(sys.argv[1], StageName), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
