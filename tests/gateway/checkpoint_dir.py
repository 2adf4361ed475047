"""Files of checkpoints without a model, a small tokenizer and a chat template; and findings of the doctor."""

import copy
import json
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ops.doctor.finding import Finding

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"]
SPECIAL += ["<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "Hello world, how are you today? I am fine, thank you very much.\n\n" * 4,
    "The quick brown fox jumps over the lazy dog. <| |> im_start im_end user assistant system\n" * 4,
    "naïve café — 日本語のテキスト、emoji 😀 👍🏽 and numbers 12345.\n" * 4,
]


def make_checkpoint_dir(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    config = copy.deepcopy(CONFIG)
    config["thinker_config"]["text_config"]["vocab_size"] = size
    write(directory / "config.json", config)
    # What only stages read, which are imitated: just enough to be taken for complete.
    write(directory / "preprocessor_config.json", {})
    merged = {name: count for tensors in SHARDS.values() for name, count in tensors.items()}
    write_weights(directory / "model.safetensors", merged)
    write_speakers(directory)
    write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": SPECIAL,
            "clean_up_tokenization_spaces": False,
        },
    )
    write(directory / "chat_template.json", {"chat_template": TEMPLATE})
    return directory


def write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_omni",
    "dtype": "float32",
    "thinker_config": {
        "text_config": {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        }
    },
    "talker_config": {
        "head_dim": 32,
        "embedding_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
}
SHARDS = {
    "model-00001-of-00002.safetensors": {"thinker.a": 1000, "talker.a": 500},
    "model-00002-of-00002.safetensors": {"thinker.b": 24, "token2wav.a": 100},
}
INDEX = "model.safetensors.index.json"


def write_weights(path: Path, tensors: dict[str, int]) -> None:
    """Write float32 tensors of so many elements."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, count in tensors.items():
        tensor: Any = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        header[name] = tensor
        end += 4 * count
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_speakers(directory: Path) -> None:
    """Write an archive like torch.save's, whose pickle nobody here may read."""
    with zipfile.ZipFile(directory / "spk_dict.pt", "w") as archive:
        archive.writestr("spk_dict/data.pkl", b"\x80\x02}.")
        archive.writestr("spk_dict/data/0", bytes(4096))


def write_model(directory: Path, sharded: bool = True) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    write_speakers(directory)
    if not sharded:
        merged = {name: count for tensors in SHARDS.values() for name, count in tensors.items()}
        write_weights(directory / "model.safetensors", merged)
        return directory
    for name, tensors in SHARDS.items():
        write_weights(directory / name, tensors)
    places = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    return directory


def only(findings: Iterable[Finding], level: str, *words: str) -> Finding:
    """The only finding, which must be of this level, and say these words."""
    (finding,) = findings
    assert (finding.level, [each for each in words if each not in finding.what]) == (level, []), finding
    assert finding.level == "ok" or finding.advice
    return finding


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]
