"""The tokenizer of a made checkpoint: byte-level BPE as Qwen2's, and the chat template."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from checkpoint.corpus import COMMON_WORDS, PAUSES, ROLES, SENTENCE_ENDS, training_lines
from omnirelay.errors import CheckpointError, OutputError
from shared.tokenizer import qwen2_tokenizer

_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item.type in ("image", "image_url") or "image" in item or "image_url" in item -%}
<vision_bos><image><vision_eos>
{%- elif item.type in ("audio", "audio_url", "input_audio") or "audio" in item or "audio_url" in item -%}
<audio_bos><audio><audio_eos>
{%- elif item.type in ("video", "video_url") or "video" in item or "video_url" in item -%}
<vision_bos><video><vision_eos>
{%- elif "text" in item -%}
{{- item.text -}}
{%- endif -%}
{%- endmacro -%}
<default>{%- for message in messages -%}
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
_DEFAULT_SYSTEM = """\
{%- if messages and messages[0].role != "system" -%}
{{- "<|im_start|>system\\n<system><|im_end|>\\n" -}}
{%- endif -%}
"""


@dataclass(frozen=True)
class NamedTokens:
    """Special tokens of media, by the names that processors know them by."""

    image: str = "<|IMAGE|>"
    audio: str = "<|AUDIO|>"
    video: str = "<|VIDEO|>"
    vision_bos: str = "<|vision_bos|>"
    vision_eos: str = "<|vision_eos|>"
    audio_bos: str = "<|audio_bos|>"
    audio_eos: str = "<|audio_eos|>"

    def named(self) -> dict[str, str]:
        """Each by its processor's name."""
        return {f"{name}_token": token for name, token in asdict(self).items()}


def chat_template(tokens: NamedTokens, system: str | None) -> str:
    """The template with these tokens; ``system`` is for conversations without a message of the system."""
    template = _TEMPLATE.replace(
        "<default>", "" if system is None else _DEFAULT_SYSTEM.replace("<system>", system)
    )
    for name, token in asdict(tokens).items():
        template = template.replace(f"<{name}>", token)
    return template


SYSTEM = "You are a helpful assistant."
CHAT_TEMPLATE = chat_template(NamedTokens(), SYSTEM)
_END = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def build_tokenizer(trained: int, specials: dict[str, int], lines: list[str] | None = None) -> Tokenizer:
    """Train so many byte-pair tokens, the same for equal arguments, and put every special token at its id.

    They are trained on ``lines``, by default those of :mod:`checkpoint.corpus`.
    """
    tokenizer = qwen2_tokenizer(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=trained,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_lines() if lines is None else lines, trainer)
    learned: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    first = min(specials.values())
    # A filler has no merge, so no text is ever encoded to it: it only holds its place.
    vocabulary |= {f"<|filler_{index}|>": index for index in range(len(vocabulary), first)}
    tokenizer = qwen2_tokenizer(
        BPE(vocab=vocabulary, merges=[(left, right) for left, right in learned["merges"]])
    )
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


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens of which legible text is made: whole words, commas."""
    return _single_tokens(tokenizer, [*(f" {word}" for word in COMMON_WORDS), *PAUSES])


def sentence_end_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end a sentence."""
    return _single_tokens(tokenizer, SENTENCE_ENDS)


def role_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of the token that names each role's turn."""
    found = {role: _single_tokens(tokenizer, (role,)) for role in ROLES}
    if absent := [role for role, ids in found.items() if not ids]:
        raise CheckpointError(f"vocabulary.trained is too small: {', '.join(absent)} is no token")
    return {role: ids[0] for role, ids in found.items()}


def user_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that names the user's turn."""
    return role_ids(tokenizer)["user"]


def _single_tokens(tokenizer: Tokenizer, texts: list[str] | tuple[str, ...]) -> list[int]:
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return sorted({ids[0] for ids in encoded if len(ids) == 1})


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    longest: int,
    tokens: NamedTokens = NamedTokens(),
    processor: str = "Qwen2_5OmniProcessor",
    system: str | None = SYSTEM,
) -> None:
    """Write the tokenizer's files; ``longest`` is the most tokens that the thinker can take."""
    names, template = tokens.named(), chat_template(tokens, system)
    try:
        tokenizer.save(str(directory / "tokenizer.json"))
        tokenizer.model.save(str(directory))
    except Exception as error:
        # The library has no class for it.
        raise OutputError(f"cannot write the tokenizer: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {flag: getattr(token, flag) for flag in flags}
            for index, token in sorted(added.items())
        },
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "extra_special_tokens": names,
        "model_max_length": longest,
        "processor_class": processor,
        "split_special_tokens": False,
        # transformers gives Qwen2's own class Qwen2's normalizer, whatever the file says.
        "tokenizer_class": "Qwen2Tokenizer" if _is_qwens(tokenizer) else "PreTrainedTokenizerFast",
        "unk_token": None,
        **names,
        **_END,
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(
        directory / "special_tokens_map.json",
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *names.values()], **names, **_END},
    )
    write_json(
        directory / "added_tokens.json", {token.content: index for index, token in sorted(added.items())}
    )
    # transformers 5 reads the bare template; older releases and other programs read the JSON one.
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(directory / "chat_template.json", {"chat_template": template})


def _is_qwens(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.normalizer, normalizers.NFC)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, indented, in the order given."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
