"""Ask by voice: a WAV file is the question, the answer is spoken into another one."""

import argparse

from omnirelay import ChatMessage, Client, SamplingOverrides, audio

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", metavar="QUESTION.wav")
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--voice", help="the voice; the model's default without it")
parser.add_argument("--out", default="answer.wav")
parser.add_argument("--max-tokens", type=int, default=256, help="of text")
parser.add_argument("--max-seconds", type=float, default=30, help="of speech")
arguments = parser.parse_args()

with Client(arguments.address) as client:
    # A conversation: append the answer and the next question to go on with it.
    conversation = [ChatMessage("user", [audio(arguments.question)])]
    result = client.chat(
        conversation,
        voice=arguments.voice,
        max_tokens=arguments.max_tokens,
        codec_sampling=SamplingOverrides(max_tokens=int(50 * arguments.max_seconds)),
    ).result()
print(result.text)
result.save(arguments.out)
