"""A stack from Python: :class:`Omni` in plain code, :class:`AsyncOmni` with asyncio.

The distribution ``omnirelay-server`` brings this package.

Example::

    from omnirelay.server import Omni

    with Omni("Qwen/Qwen2.5-Omni-3B", voice="Chelsie") as omni:
        for answer in omni.generate(["Hello", {"text": "What is this?", "images": "cat.jpg"}]):
            print(answer.text)
"""

from ops.omni.clients import AsyncOmni, Omni, OmniAnswer

__all__ = ["AsyncOmni", "Omni", "OmniAnswer"]
