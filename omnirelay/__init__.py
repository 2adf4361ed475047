"""Client of an OmniRelay server: :class:`Client` for plain code, :class:`AsyncClient` for asyncio.

Example::

    from omnirelay import AudioEvent, Client, TextEvent

    with Client("tcp://127.0.0.1:5555") as client:
        for event in client.chat("Hello", voice="Chelsie"):
            if isinstance(event, TextEvent):
                print(event.text, end="", flush=True)

Media go with the text, ``client.chat("What is this?", images="cat.jpg")``, or into the messages of a
conversation: :func:`audio`, :func:`image`, :func:`video`.  Errors are in :mod:`omnirelay.errors`.

The names are those of :mod:`omnirelay.names`, loaded on first use: the commands handle Ctrl-C before.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnirelay.names import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from importlib.util import find_spec  # noqa: PLC0415 - slow

        # A submodule is no attribute before it is imported, and may be one that ``names`` needs.
        if find_spec(f"{__name__}.{name}") is None:
            names = import_module("omnirelay.names")
            if name == "__all__" or name in names.__all__:
                return getattr(names, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("omnirelay.names").__all__})
