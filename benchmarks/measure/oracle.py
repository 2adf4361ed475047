"""transformers as the oracle: every prompt computed as the released weights were trained.

Tests and benchmarks compare with the same one (docs/adr/0022).
"""

from functools import wraps
from typing import Any


def keep_talker_mask(model: Any) -> None:
    """Let the talker of a ``Qwen2_5OmniForConditionalGeneration`` have an attention mask for every prompt.

    The talker adds the codec pad and start embeddings and computes M-RoPE positions only where it is given a
    mask, but ``generate`` drops one that is all ones, as that of a prompt without padding is.
    """
    forward = model.talker.forward

    @wraps(forward)
    def with_mask(*arguments: Any, **options: Any) -> Any:
        if options.get("attention_mask") is None:
            inputs, past = options.get("inputs_embeds"), options.get("past_key_values")
            inputs = options["input_ids"] if inputs is None else inputs
            seen = 0 if past is None else past.get_seq_length()
            ones = options["input_text_ids"].new_ones(inputs.shape[0], seen + inputs.shape[1])
            options["attention_mask"] = ones
        return forward(*arguments, **options)

    model.talker.forward = with_mask
