"""What ``generate`` takes and returns."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnirelay import ChatMessage, ChatResult, GenerateRequest, build_request

OmniPrompt = str | Mapping[str, Any] | GenerateRequest
"""A text; options of ``chat`` in a dict, with ``text`` or ``messages``; or a whole request."""


class Prepared:
    """A prompt whose options are known, and whose files are not read yet.

    Args:
        prompt: The prompt.
        options: Of all prompts; those of the prompt itself go before.

    Attributes:
        prompt: The prompt.

    Raises:
        TypeError: There is no such option.
    """

    def __init__(self, prompt: OmniPrompt, options: Mapping[str, Any]) -> None:
        self.prompt = prompt
        own = dict(prompt) if isinstance(prompt, Mapping) else {"text": prompt}
        asked = own.pop("messages") if "messages" in own else own.pop("text", "")
        self._call = inspect.signature(build_request).bind(asked, **{**options, **own})

    def request(self) -> GenerateRequest:
        """Build the request, and read its files; raises as :func:`omnirelay.build_request`."""
        return build_request(*self._call.args, **self._call.kwargs)


@dataclass(frozen=True, repr=False)
class OmniAnswer(ChatResult):
    """A whole answer; ``chat(..., history=answer)`` continues its conversation.

    Attributes:
        prepared: The prompt with its options.
    """

    prepared: Prepared

    @property
    def prompt(self) -> OmniPrompt:
        """What was passed to ``generate``."""
        return self.prepared.prompt

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages of the prompt, whose files are read again, and the answer."""
        return [*self.prepared.request().messages, ChatMessage("assistant", self.text)]
