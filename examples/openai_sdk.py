"""OpenAI's Python client against the server's HTTP API: streamed text and speech.

Needs `pip install openai`.
"""

import argparse
import base64
import wave

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is twenty plus sixteen?")
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none", help="where the server asks for keys")
parser.add_argument("--voice", default="Chelsie")
parser.add_argument("--out", default="answer.wav")
parser.add_argument("--max-tokens", type=int, default=256, help="of text")
parser.add_argument("--max-seconds", type=float, default=30, help="of speech")
arguments = parser.parse_args()

with (
    OpenAI(base_url=arguments.url, api_key=arguments.api_key) as client,
    wave.open(arguments.out, "wb") as file,
):
    file.setparams((1, 2, 24_000, 0, "NONE", ""))
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": arguments.question}],
        modalities=["text", "audio"],
        audio={"voice": arguments.voice, "format": "pcm16"},
        max_completion_tokens=arguments.max_tokens,
        # Not in OpenAI's API: 50 codec tokens make a second of speech.
        extra_body={"codec_sampling": {"max_tokens": int(50 * arguments.max_seconds)}},
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            # OpenAI's types do not know streamed speech.
            speech = getattr(choice.delta, "audio", None)
            if speech and speech.transcript:
                print(speech.transcript, end="", flush=True)
            if speech and speech.data:
                file.writeframes(base64.b64decode(speech.data))
print()
