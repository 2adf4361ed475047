"""Answer a file of prompts, one a line, several at a time; print each result as a line of JSON.

For large files with speech and media, and to resume after a stop, use `omnirelay batch` on the server.
"""

import argparse
import asyncio
import json
from pathlib import Path

from omnirelay import AsyncClient
from omnirelay.errors import RequestError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompts", type=Path)
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--concurrency", type=int, default=8)
parser.add_argument("--max-tokens", type=int, default=256)


async def main(arguments: argparse.Namespace) -> None:
    """Answer every line."""
    most, slots = arguments.max_tokens, asyncio.Semaphore(arguments.concurrency)
    async with AsyncClient(arguments.address) as client:

        async def answer(number: int, prompt: str) -> None:
            async with slots:
                try:
                    result = await client.chat(prompt, speech=False, max_tokens=most).result()
                    print(json.dumps({"line": number, "text": result.text}), flush=True)
                except RequestError as error:
                    print(
                        json.dumps({"line": number, "error": error.code, "message": str(error)}), flush=True
                    )

        lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
        await asyncio.gather(*(answer(number, line) for number, line in enumerate(lines, 1) if line.strip()))


asyncio.run(main(parser.parse_args()))
