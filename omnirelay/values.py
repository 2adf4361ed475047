"""Types and bounds of message fields."""

import re
from typing import Annotated, Final, Literal

from msgspec import Meta

API_KEY_VARIABLE: Final = "OMNIRELAY_API_KEY"
"""The environment variable that holds the API key of a client's commands."""
TRANSCRIPTION_PROMPT: Final = "Transcribe the audio."
"""Follows a recording that is to be transcribed; checkpoints may be trained on exactly this."""
SAMPLE_RATE: Final = 24_000
"""Samples per second of every waveform, fixed by the model's vocoder."""
SAMPLE_BYTES: Final = 4
"""Of a sample on the wire: float32, little-endian."""
MAX_START_DELAY_S: Final = 60
"""Longest delay that a gateway may advise before speech is played."""
StageName = Literal["thinker", "talker", "token2wav"]
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")
FinishReason = Literal["stop", "length"]
"""Why a token stream ended: an end token was sampled, or the limit on tokens was reached."""
MediaKind = Literal["audio", "image", "video"]
_PLAIN: Final = r"^[A-Za-z0-9_.-]+\Z"
_DIGITS: Final = r"^[0-9]{1,9}\Z"
_FORMS: Final = {repr(_PLAIN): "of letters, digits, '_', '.' and '-' only", repr(_DIGITS): "of 1 to 9 digits"}
# At the beginning alone: a client's names, which a message may repeat, are not searched.
_PATTERN: Final = re.compile(r"\A(Expected `str` )matching regex ('.*?')(?= - at|\Z)")
PlainName = Annotated[str, Meta(min_length=1, max_length=64, pattern=_PLAIN)]
RequestId = PlainName
TokenIdText = Annotated[str, Meta(pattern=_DIGITS)]
"""A token id as the key of a JSON object."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Meta(ge=1, lt=2**31)]
ChunkFrames = Annotated[list[PositiveCount], Meta(max_length=1024)]
"""Sizes of the chunks of a stream of speech, in codec frames."""
SampledIds = Annotated[list[TokenId], Meta(max_length=2**20)]
"""Tokens that were sampled, from the first one on: as many as 65,536 frames of Qwen3-Omni have."""
ChunkSamples = Annotated[list[Count], Meta(max_length=65_536)]
"""Samples of the chunks of a stream of speech, from the first one on."""
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
"""The range of vLLM and of OpenAI's API."""
MAX_TOP_K: Final = 2**20
TopK = Annotated[int, Meta(ge=0, le=MAX_TOP_K)]
TopP = Annotated[float, Meta(gt=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.1, le=10)]
"""Logits are divided and multiplied by it in float32: much smaller numbers would make them infinite."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MinP = Annotated[float, Meta(ge=0, le=1)]
LogitBias = Annotated[float, Meta(ge=-100, le=100)]
MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
MAX_SCHEMA_CHARACTERS: Final = 2**16
JsonSchema = Annotated[str, Meta(min_length=2, max_length=MAX_SCHEMA_CHARACTERS)]
"""A JSON schema as text; its length bounds the cost of compiling it."""
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
AddressText = Annotated[str, Meta(min_length=1, max_length=1024)]
TraceParent = Annotated[
    str,
    Meta(
        min_length=55, max_length=55, pattern=r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z"
    ),
]
"""W3C's ``traceparent`` header: version, trace, span, flags."""


def in_words(problem: str) -> str:
    """Return msgspec's message with a pattern that a text should match in words."""
    return _PATTERN.sub(lambda found: found[1] + _FORMS.get(found[2], "of another form"), problem)
