"""Ask one question; print the text as it comes and save the speech as a WAV file."""

import argparse

from omnirelay import Client, SamplingOverrides

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is twenty plus sixteen?")
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--out", default="answer.wav")
parser.add_argument("--max-tokens", type=int, default=256, help="of text")
parser.add_argument("--max-seconds", type=float, default=30, help="of speech")
arguments = parser.parse_args()

with Client(arguments.address) as client:
    result = client.chat(
        arguments.question,
        max_tokens=arguments.max_tokens,
        codec_sampling=SamplingOverrides(max_tokens=int(50 * arguments.max_seconds)),
    ).result()
print(result.text)
result.save(arguments.out)
print(f"{result.done.audio_seconds:.1f} s of speech in {arguments.out}")
