"""Play the speech while it is generated, or collect it; the text is printed as it comes.

python stream.py --play "aplay -q -f FLOAT_LE -r 24000 -c 1"
python stream.py --out answer.raw
"""

import argparse
import asyncio
import shlex
from contextlib import AsyncExitStack
from pathlib import Path

from omnirelay import AsyncClient, AudioEvent, SamplingOverrides, TextEvent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("question", nargs="?", default="What is twenty plus sixteen?")
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--play", metavar="COMMAND", help="reads float32 samples, 24 kHz, mono, from its input")
parser.add_argument("--out", type=Path, metavar="FILE", help="gets the same samples")
parser.add_argument("--max-tokens", type=int, default=256, help="of text")
parser.add_argument("--max-seconds", type=float, default=30, help="of speech")


async def main(arguments: argparse.Namespace) -> None:
    """Stream one answer."""
    collected = bytearray()
    async with AsyncClient(arguments.address) as client, AsyncExitStack() as stack:
        player = None
        if arguments.play:
            command = shlex.split(arguments.play)
            player = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
            # Ends its input, also after an error; the last samples are still to be played then.
            stack.push_async_callback(player.communicate, b"")
        answer = client.chat(
            arguments.question,
            max_tokens=arguments.max_tokens,
            codec_sampling=SamplingOverrides(max_tokens=int(50 * arguments.max_seconds)),
        )
        async for event in answer:
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)
            elif isinstance(event, AudioEvent):
                collected += event.pcm
                if player is not None and player.stdin is not None:
                    player.stdin.write(event.pcm)
                    await player.stdin.drain()
    print(f"\n{len(collected) / 4 / 24_000:.1f} s of speech")
    if arguments.out:
        arguments.out.write_bytes(collected)


asyncio.run(main(parser.parse_args()))
