"""The tokenizer of a made checkpoint: byte-level BPE as Qwen2's, and the chat template."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from checkpoint.corpus import COMMON_WORDS, PAUSES, ROLES, SENTENCE_ENDS, training_lines
from checkpoint.shape import VocabularyShape
from omnirelay.errors import CheckpointError, OutputError

# How Qwen2 splits text before byte pairs are merged; the same expression as in the released tokenizer.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item.type in ("image", "image_url") or "image" in item or "image_url" in item -%}
<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif item.type in ("audio", "audio_url", "input_audio") or "audio" in item or "audio_url" in item -%}
<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif item.type in ("video", "video_url") or "video" in item or "video_url" in item -%}
<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif "text" in item -%}
{{- item.text -}}
{%- endif -%}
{%- endmacro -%}
{%- if messages and messages[0].role != "system" -%}
{{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{{- "<|im_start|>" ~ message.role ~ "\\n" -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}{{- part(item) -}}{%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""

_NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_END = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def build_tokenizer(shape: VocabularyShape, lines: list[str] | None = None) -> Tokenizer:
    """Train the byte-pair tokens, the same for equal arguments, and put every special token at its id.

    They are trained on ``lines``, by default those of :mod:`checkpoint.corpus`.
    """
    tokenizer = _bare(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=shape.trained,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_lines() if lines is None else lines, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = trained["vocab"]
    specials = shape.ids.tokens()
    first = min(specials.values())
    # A filler has no merge, so no text is ever encoded to it: it only holds its place.
    vocabulary |= {f"<|filler_{index}|>": index for index in range(len(vocabulary), first)}
    tokenizer = _bare(BPE(vocab=vocabulary, merges=[(left, right) for left, right in trained["merges"]]))
    by_id = {index: text for text, index in specials.items()}
    tokenizer.add_special_tokens(
        [
            AddedToken(by_id.get(index, f"<|reserved_{index}|>"), special=True, normalized=False)
            for index in range(first, max(by_id) + 1)
        ]
    )
    for text, index in specials.items():
        if tokenizer.token_to_id(text) != index:
            raise CheckpointError(f"{text} came out at {tokenizer.token_to_id(text)} instead of {index}")
    return tokenizer


def _bare(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens of which legible text is made: whole words, commas."""
    return _single_tokens(tokenizer, [*(f" {word}" for word in COMMON_WORDS), *PAUSES])


def sentence_end_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end a sentence."""
    return _single_tokens(tokenizer, SENTENCE_ENDS)


def user_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that names the user's turn."""
    found = _single_tokens(tokenizer, ROLES[1:2])
    if not found:
        raise CheckpointError("vocabulary.trained is too small: the word of the user's turn is no token")
    return found[0]


def _single_tokens(tokenizer: Tokenizer, texts: list[str] | tuple[str, ...]) -> list[int]:
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return sorted({ids[0] for ids in encoded if len(ids) == 1})


def write_tokenizer(directory: Path, tokenizer: Tokenizer, longest: int) -> None:
    """Write the tokenizer's files; ``longest`` is the most tokens that the thinker can take."""
    try:
        tokenizer.save(str(directory / "tokenizer.json"))
        tokenizer.model.save(str(directory))
    except Exception as error:
        # The library has no class for it.
        raise OutputError(f"cannot write the tokenizer: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    named = list(_NAMED_TOKENS.values())
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {flag: getattr(token, flag) for flag in flags}
            for index, token in sorted(added.items())
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "extra_special_tokens": _NAMED_TOKENS,
        "model_max_length": longest,
        "processor_class": "Qwen2_5OmniProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **_NAMED_TOKENS,
        **_END,
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(
        directory / "special_tokens_map.json",
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *named], **_NAMED_TOKENS, **_END},
    )
    write_json(
        directory / "added_tokens.json", {token.content: index for index, token in sorted(added.items())}
    )
    # transformers 5 reads the bare template; older releases and other programs read the JSON one.
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, indented, in the order given."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
