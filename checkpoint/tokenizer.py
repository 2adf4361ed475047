"""The tokenizer of a made checkpoint: byte-level BPE as Qwen2's, and the chat template."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from omnirelay.errors import CheckpointError, OutputError
from shared.tokenizer import qwen2_tokenizer

_WORDS = """
a able about above across act add after again age ago agree air all almost alone along already also
always am among an and animal another answer any apple are area arm around art as ask at away baby back
bad bag ball bank be bear beautiful because become bed been before began begin behind being believe bell
below best better between big bird black blue boat body book both box boy bread break bright bring broke
brother brought brown build but buy by call came can car care carry cat catch caught center chair chance
change chief child children choose circle city class clean clear climb close cloud coast cold color come
common complete contain control cook cool copy corner correct could count country course cover cow create
cross cry cut dance dark daughter day dead deal dear decide deep did differ dinner direct distant do
doctor does dog done door double down draw dream dress drink drive drop dry during each ear early earth
east easy eat edge effect egg eight either else end energy engine enjoy enough enter equal even evening
event ever every example eye face fact fair fall family famous far farm fast father favor fear feed feel
feet fell few field fight figure fill final find fine finger finish fire first fish fit five flat floor
flow flower fly follow food foot for force forest forget form forward found four free fresh friend from
front fruit full fun game garden gate gather gave gentle get girl give glad glass go gold gone good got
government grass great green grew ground group grow guess guide had hair half hand happen happy hard has
hat have he head hear heard heart heat heavy held hello help her here high hill him his history hold
hole home hope horse hot hotel hour house how however huge human hundred hurry husband i ice idea if
imagine important in inch include inside instead interest into iron is island it job join joy jump just
keep kept key kind king kitchen knew know lady lake land language large last late laugh law lay lead
learn least leave led left leg less lesson let letter level lie life lift light like line list listen
little live long look lost lot loud love low machine made magic main make man many map mark market matter
may me mean measure meat meet men middle might mile milk million mind minute miss model modern moment
money month moon more morning most mother mountain mouth move much music must my name nation nature near
need neighbor never new next nice night nine no noise noon nor north nose not note nothing notice now
number object observe ocean of off offer office often oh oil old on once one only open or orange order
other our out over own page paint pair paper parent park part party pass past path pattern pay people
perhaps person picture piece place plain plan plane planet plant play please point poor position possible
power practice prepare present pretty problem produce promise proud public pull push put quart question
quick quiet quite race radio rain raise ran reach read ready real reason record red remember repeat
reply rest result rich ride right ring rise river road rock roll room root rope rose round row rule run
safe said sail salt same sand sat save saw say school science sea search season seat second see seed
seem self send sense sentence serve set seven several shall shape share she sheet ship shirt shoe shop
short should shoulder show side sight sign silent silver similar simple since sing sister sit six size
skin sky sleep slow small smell smile snow so soft soil some son song soon sound south space speak special
speech speed spend spoke spot spread spring square stand star start state station stay steel step still
stone stood stop store story straight strange street string strong student study such sudden sugar suit
summer sun supply support sure surface sweet swim system table tail take talk tall teach team teeth tell
ten test than thank that the their them then there these they thick thin thing think third this those
though thought three through time tiny to today together told tomorrow too took tool top total touch
toward town track trade train travel tree triangle trip trouble true trust try turn twelve twenty two
type uncle under understand unit until up upon us use usual valley value very view village visit voice
wait walk wall want war warm was wash watch water wave way we wear weather week weight well went were west
what wheel when where which while white who whole why wide wife wild will win wind window winter wish with
woman women wonder wood word work world would write wrong year yellow yes yet you young your
"""
COMMON_WORDS: tuple[str, ...] = tuple(_WORDS.split())

SENTENCES: tuple[str, ...] = (
    "What is the weather like today?",
    "Please tell me a short story about the sea.",
    "I can see and hear you, and I can speak with you.",
    "The children walk to school in the morning.",
    "How many birds are there in the picture?",
    "Yes, you are right! That is a good question.",
    "No, I do not think so, but thank you.",
    "Where did you hear that sound?",
    "It was a dark night, and the wind was strong.",
    "You are a helpful assistant.",
    "Describe what you see in this image.",
    "Count from one to ten, please.",
)

ROLES: tuple[str, ...] = ("system", "user", "assistant")
SENTENCE_ENDS: tuple[str, ...] = (".", "?", "!")
PAUSES: tuple[str, ...] = (",",)


def training_lines() -> list[str]:
    """Return the lines from which the tokenizer is trained, the same for every call.

    Each common word stands with a space before it, as inside a sentence, so that it becomes one token.  A
    role stands at the start of a line, as after ``<|im_start|>``: the config names the token of "user".
    """
    words = " ".join(COMMON_WORDS)
    return [f" {words}", *SENTENCES, *(f"{role}\n" for role in ROLES for _ in range(50))]


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

    They are trained on ``lines``, by default those of :mod:`checkpoint.tokenizer`.
    """
    tokenizer = qwen2_tokenizer(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=trained, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
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
    own = isinstance(tokenizer.normalizer, normalizers.NFC)
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
        "tokenizer_class": "Qwen2Tokenizer" if own else "PreTrainedTokenizerFast",
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, indented, in the order given."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
