"""The code predictor draws what transformers' draws, for many frames at once."""

from typing import Any

import pytest
import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from services.families.qwen3_omni.predictor import TOP_K, TOP_P, CodePredictor, pick
from tests.support.steps import step_of
from tests.support.thinking import ThinkerRig

SHAPES: dict[str, dict[str, Any]] = {
    "two groups": {"num_code_groups": 2, "num_key_value_heads": 4},
    "released groups": {"num_code_groups": 16, "num_key_value_heads": 2, "head_dim": 24},
    "one layer": {"num_code_groups": 5, "num_hidden_layers": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_frames_are_completed_as_by_the_reference(thinker: ThinkerRig, shape: str) -> None:
    small = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = Qwen3OmniMoeTalkerCodePredictorConfig(**{**small, **SHAPES[shape]})
    torch.manual_seed(3)
    reference: Any = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration._from_config(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(mean=float(weight.ndim == 1), std=weight[0].numel() ** -0.5)
    # In the processes' groups of an engine.
    with set_current_vllm_config(thinker.engine.vllm_config):
        model = CodePredictor(config, most=8).eval()
    assert model.load_weights(reference.state_dict().items()) == set(dict(model.named_parameters()))
    for layer in model.modules():
        if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(layer)
    hidden, first = torch.randn(2, 7, 32)
    draws = torch.zeros(7, config.num_code_groups - 1)
    with torch.no_grad():
        # Between the codebooks of a frame nobody waits for a device.
        with step_of("cpu"):
            ours = model(hidden, first, draws)
        theirs = reference.generate(
            inputs_embeds=torch.stack([hidden, first], dim=1),
            max_new_tokens=config.num_code_groups - 1,
            do_sample=False,
        )
    assert ours.tolist() == theirs.tolist()
    assert len(set(map(tuple, ours.tolist()))) == len(ours), "equal frames are no test"


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0, 50.0], ids="logits times {}".format)
def test_ids_are_as_likely_as_the_references(scale: float) -> None:
    logits = scale * torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    ids: Any = torch.empty(1, 0)
    warped = TopPLogitsWarper(TOP_P)(ids, TopKLogitsWarper(TOP_K)(ids, logits))
    draws = torch.arange(2**16) / 2**16
    picked = pick(logits.expand(len(draws), -1), draws)
    found = torch.bincount(picked, minlength=300) / len(draws)
    torch.testing.assert_close(found, warped.softmax(-1)[0], atol=2**-15, rtol=0)
    assert picked[0] == logits.argmax()
    assert pick(logits, torch.tensor([1 - 2.0**-24])) in warped.isfinite().nonzero()[:, 1]
