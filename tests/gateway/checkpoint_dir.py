"""A checkpoint directory with what the gateway reads: a small tokenizer and a chat template."""

import copy
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.gateway.doctor.model_files import CONFIG, SHARDS, write_speakers, write_weights

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
