"""Speech for the training: synthesizers, corpus, mel spectrograms, codec ids, variations for hearing."""

import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from labs.training.data import augmentation, codes, mel
from labs.training.data.conditions import CONDITIONS
from labs.training.data.corpus import VOICES, SpeechCorpus, make_corpus
from labs.training.data.hearing import make_hearing
from labs.training.data.synthesis import SynthesizerVoice, Wave, synthesize
from labs.training.files import replacing
from labs.training.parts import vocoder
from omnirelay.errors import CheckpointError
from tests.support.media import speech
from tests.support.training import HELD_OUT, TRAINED, hum, sentences

pytestmark = pytest.mark.training


# As both synthesizers are called: the text and the file are among the arguments.
PROGRAM = """\
#!{python}
import pathlib, shutil, sys
words = sys.argv[1:]
output = words[words.index("-o" if "-o" in words else "-w") + 1]
if "nothing" in words:
    sys.exit("no such voice")
shutil.copyfile("{speech}", output)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> SpeechCorpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"), sentences(), hum)


@pytest.mark.parametrize(
    "voice", [SynthesizerVoice("flite", "slt"), SynthesizerVoice("espeak", "en-us", 1.2)]
)
def test_a_synthesizer_speaks_without_silence_around(
    voice: SynthesizerVoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken = speech("seven plus five", 22_050)
    soundfile.write(tmp_path / "speech.wav", np.pad(spoken, 22_050), 22_050)
    for name in ("flite", "espeak-ng"):
        program = tmp_path / name
        program.write_text(PROGRAM.format(python=sys.executable, speech=tmp_path / "speech.wav"))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    wave = synthesize(voice, "seven plus five", 16_000)
    assert wave.dtype == np.float32
    assert 0.5 < len(wave) / 16_000 < len(spoken) / 22_050 + 0.2
    with pytest.raises(CheckpointError, match="no such voice"):
        synthesize(SynthesizerVoice(voice.program, "nothing"), "seven")


def test_a_missing_synthesizer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="apt-get install flite"):
        synthesize(VOICES["Chelsie"], "one")


def test_the_corpus_holds_each_sentence_in_both_voices(corpus: SpeechCorpus) -> None:
    for voice in VOICES:
        assert [item.text for item in corpus.of(voice)] == TRAINED
        assert [item.text for item in corpus.of(voice, held_out=True)] == HELD_OUT
        for item in corpus.of(voice):
            wave, frames = corpus.wave(item), corpus.mel(item)
            assert len(wave) == item.codes * 480
            assert frames.shape == (item.codes * 2, mel.BINS)
            again = mel.log_mel(torch.from_numpy(wave.copy())[None])[0].T.numpy()
            # Both are rounded: to 16 bits on the one side, to half precision on the other.
            assert np.abs(again - frames).mean() < 0.02


def test_a_corpus_that_is_there_is_not_made_again(corpus: SpeechCorpus, tmp_path: Path) -> None:
    def fail(_voice: SynthesizerVoice, _text: str, _rate: int) -> Wave:
        raise AssertionError

    make_corpus(tmp_path, sentences(), hum)
    assert make_corpus(tmp_path, sentences(), fail).utterances == corpus.utterances
    with pytest.raises(CheckpointError, match="run the part `corpus` first"):
        SpeechCorpus(tmp_path / "elsewhere")


def test_a_tone_is_loudest_in_its_mel_band() -> None:
    time = torch.arange(24_000) / 24_000
    frames = mel.log_mel(torch.stack([torch.sin(6.2832 * hertz * time) for hertz in (300, 3000)]))
    low, high = frames[:, :, 50].argmax(1).tolist()
    assert frames.shape == (2, 80, 100)
    assert 5 < low < 15 < high < 60


def test_codec_ids_start_at_one_and_are_the_same_again(corpus: SpeechCorpus, tmp_path: Path) -> None:
    ids = codes.make_codes(corpus, tmp_path / "one.safetensors", corpus, count=16)
    assert len(ids) == len(corpus.mels) // 2
    assert ids.min() >= 1
    assert ids.max() <= 16
    assert len(set(ids.tolist())) > 8
    assert (codes.make_codes(corpus, tmp_path / "two.safetensors", corpus, count=16) == ids).all()
    # From the file, of which another number of centres could not be.
    assert (codes.make_codes(corpus, tmp_path / "one.safetensors", corpus, count=4) == ids).all()


def test_the_activation_that_trains_faster_equals_the_reference() -> None:
    reference, ours = vocoder.build(), vocoder.build()
    vocoder.use_polyphase(ours)
    mels = torch.randn(2, mel.BINS, 12) - 4
    with torch.no_grad():
        for parameter, other in zip(reference.parameters(), ours.parameters(), strict=True):
            parameter.normal_(std=0.2)
            other.copy_(parameter)
        expected = reference(mels)
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(vocoder.waveform(ours, mels), expected, atol=1e-5, rtol=1e-4)
    assert set(ours.state_dict()) == set(reference.state_dict())


def test_variations_are_repeatable_bounded_and_varied() -> None:
    wave = speech("seven plus five", 16_000)
    varied = [augmentation.vary(wave, np.random.default_rng(seed)) for seed in range(60)]
    again = augmentation.vary(wave, np.random.default_rng(7))
    assert all((one == other).all() for one, other in zip(again, varied[7], strict=True))
    waves = [one for one, _ in varied]
    assert all(one.dtype == np.float32 and np.abs(one).max() <= 1 for one in waves)
    assert len({len(one) for one in waves}) > 20
    levels = [20 * np.log10(np.abs(one).max()) for one in waves]
    assert min(levels) < -15
    assert max(levels) > -0.1


def test_moments_say_where_the_question_is() -> None:
    wave = speech("seven plus five", 16_000)
    silent = {"before": 0, "after": 0, "within": 0}
    for seed in range(40):
        varied, moments = augmentation.vary(wave, np.random.default_rng(seed), 1.0)
        assert len(moments) == -(-len(varied) // augmentation.TOKEN)
        said = np.flatnonzero(moments != augmentation.SILENT)
        silent["before"] += said[0] > 0
        silent["after"] += said[-1] < len(moments) - 1
        silent["within"] += (moments[said[0] : said[-1]] == augmentation.SILENT).any()
        assert max(said[0], len(moments) - 1 - said[-1]) <= 26
        assert (np.diff(moments[said]) >= 0).all()
        assert moments[said[0]] < 0.2
        assert moments[said[-1]] > 0.9
    assert silent["before"] > 25
    assert silent["after"] > 25
    assert silent["within"] > 1


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in CONDITIONS.items() for name in names]
)
def test_a_condition_is_what_its_name_says(group: str, name: str) -> None:
    wave = augmentation.at_level(speech("seven plus five", 16_000), -22)
    recorded = CONDITIONS[group][name](wave, np.random.default_rng(0))
    again = CONDITIONS[group][name](wave, np.random.default_rng(0))
    assert recorded.dtype == np.float32
    assert (recorded == again).all()
    level = 20 * np.log10(augmentation.loudness_of(recorded))
    if group == "silence around":
        assert len(recorded) > len(wave) + 7_000
        assert np.abs(recorded).max() == np.abs(wave).max()
    elif group.startswith("noise"):
        quiet = 20 * np.log10(augmentation.loudness_of(recorded[: 16_000 // 2]))
        assert abs(-22 - quiet - float(group.split()[2])) < 3
    elif name == "-40 dBFS":
        assert abs(level + 40) < 0.1
    elif name == "overdriven":
        assert np.mean(np.abs(recorded) > 0.999) > 0.02
    else:
        assert len(recorded) == len(wave)
        assert 0.3 < np.corrcoef(recorded, wave)[0, 1] < 1
    if name in ("8 kHz", "G.711", "11 kHz"):
        above = {"8 kHz": 4_300, "G.711": 4_300, "11 kHz": 6_000}[name]
        power = np.abs(np.fft.rfft(recorded)) ** 2
        assert power[round(above * len(wave) / 16_000) :].sum() < 0.01 * power.sum()


def test_nobody_speaks_in_silence_noise_and_music() -> None:
    for seed in range(20):
        quiet = augmentation.silence(np.random.default_rng(seed))
        loud = augmentation.noise_or_music(np.random.default_rng(seed))
        assert augmentation.loudness_of(quiet) < 0.002
        assert augmentation.loudness_of(loud) > 0.005
        assert np.abs(loud).max() <= 1


def test_recordings_are_kept_on_disk(tmp_path: Path) -> None:
    recordings = make_hearing(tmp_path / "hearing", 8, hum)
    assert len(recordings.clips) == 8
    assert all(len(recordings.wave(clip)) == clip.samples > 1000 for clip in recordings.clips)


def test_a_file_is_replaced_only_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as partial:
        partial.write_text(None)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    with replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
