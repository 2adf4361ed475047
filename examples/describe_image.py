"""Ask a question about an image; the answer is text."""

import argparse

from omnirelay import Client, TextEvent

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", help="a file, or an https: URL of a host that the server may fetch from")
parser.add_argument("question", nargs="?", default="What do you see?")
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--max-tokens", type=int, default=256)
arguments = parser.parse_args()

with Client(arguments.address) as client:
    for event in client.chat(
        arguments.question, images=arguments.image, speech=False, max_tokens=arguments.max_tokens
    ):
        if isinstance(event, TextEvent):
            print(event.text, end="", flush=True)
print()
