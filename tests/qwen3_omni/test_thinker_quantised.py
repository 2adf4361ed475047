"""Qwen3-Omni's thinker with attention of four bits."""

from pathlib import Path

import pytest

from services.families.qwen3_omni.thinker.family import THINKER
from tests.qwen3_omni.test_thinker_media import Qwen3Processor, expected, request_of
from tests.qwen3_omni.tiny import Reference
from tests.support.conversations import examples
from tests.support.edges import MakeEdge
from tests.support.quantised import QUANTISED, quantise
from tests.support.thinking import ThinkerRig

pytestmark = pytest.mark.long


def test_attention_of_four_bits_gives_the_rows_of_the_weights_it_stands_for(
    experts: None,
    checkpoint: Path,
    reference: Reference,
    make_edge: MakeEdge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With AMX vLLM would quantise what flows through, too, which has an error of its own.
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    attention = tuple(name for name in QUANTISED if name[0] in "qkvo")
    # On CPUs vLLM has no kernel for experts of four bits.
    others = ["visual", "audio_tower", "mlp"]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise(checkpoint, "awq", packed, plain, parts=attention, modules_to_not_convert=others)
    # Rows of a recording are hidden states; those of text are functions of token ids.
    processor, conversation = Qwen3Processor(checkpoint), examples()["audio"]
    request = request_of("a", conversation, processor)
    rows = {}
    for directory in (packed, plain):
        rig = ThinkerRig(directory, make_edge, family=THINKER, max_model_len=1024, dtype="bfloat16")
        rig.run(request)
        rows[directory] = rig.rows("a")[: len(request.prompt_token_ids)].float()
        rig.service._grammars.close()
        rig.service._preparer.close()
    exact, whole = (expected(conversation, processor, each).rows for each in (Reference(plain), reference))
    prompt = len(rows[plain])
    rounding, packed_off, whole_off = (
        float((each[:prompt] - exact[:prompt]).norm()) for each in (rows[plain], rows[packed], whole)
    )
    assert packed_off < 2 * rounding
    # The weights before they were quantised are further off, so the test sees what was loaded.
    assert whole_off > 2 * rounding
