"""Pipecat's analyzer of turns beside the gateway's, on recordings: ``ROOT PACKAGES``."""

import json
import sys
from pathlib import Path

import numpy as np
from pipecat.audio.turn.smart_turn._whisper_features import compute_whisper_log_mel_features
from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

root = Path(sys.argv[1])
# The server's packages, for those that are not here.
sys.path += sys.argv[1:3]

from gateway.http.voice.smart_turn import SAMPLES, SmartTurn, installed_weights, log_mel  # noqa: E402
from omnirelay.errors import ConfigError  # noqa: E402

draw = np.random.default_rng(1)
theirs, ours = LocalSmartTurnAnalyzerV3(sample_rate=16_000), SmartTurn(installed_weights())
features, probabilities = [], []
for seconds in (0.5, 2.0, 8.0, 11.0):
    time = np.arange(int(seconds * 16_000)) / 16_000
    # Something like syllables.
    said = np.sin(2 * np.pi * 140 * time) * np.clip(np.sin(2 * np.pi * 4 * time), 0, None) * 0.2
    said = (said + draw.normal(size=time.size) * 0.002).astype(np.float32)
    padded = np.pad(said[-SAMPLES:], (SAMPLES - min(said.size, SAMPLES), 0))
    features.append(np.abs(log_mel(said) - compute_whisper_log_mel_features(padded)).max().item())
    found = theirs._predict_endpoint(said)["probability"]
    probabilities.append((found, ours.finished(said)))
refused = []
for name, data in (("missing", None), ("garbage", b"garbage"), ("silero", None)):
    path = root / "missing.onnx" if data is None else Path(f"{name}.onnx")
    if name == "silero":
        path = next(installed_weights().parents[3].glob("vad/data/silero*.onnx"))
    if data is not None:
        path.write_bytes(data)
    try:
        SmartTurn(path)
    except ConfigError as error:
        refused.append(str(error))
print(json.dumps({"features": features, "probabilities": probabilities, "refused": refused}))
