"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.body import read_body, read_object
from gateway.http.connection import while_connected
from gateway.http.context import Api
from gateway.http.errors import json_response
from gateway.http.fields import read_fields
from gateway.http.openai.chat_request import read_chat
from gateway.http.openai.completions import read_completion
from gateway.http.openai.strings import Body, parse
from omnirelay.content import media_of
from omnirelay.protocol import GenerateRequest


class DetokenizeFields(msgspec.Struct, frozen=True):
    """Token ids that become text; those outside the vocabulary have no text."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=2**20)]
    model: str | None = None


class TokensApi(Api):
    """The endpoints."""

    async def tokenize(self, request: Request) -> Response:
        """Answer the token ids of a text, or of a conversation with one placeholder for each of its media.

        Raises:
            InvalidRequestError: It is invalid, or too long.
            BusyError: There is no memory for its media.
            ClientGoneError: The client disconnected.
        """
        context = self._context
        read = partial(_read, model=context.model, max_item_bytes=context.max_item_bytes)
        model, with_texts, asked = await read_body(request, context, read)
        context.require_model(model)
        hold = context.gateway.held.of(context.share(request))
        try:
            hold.grow(sum(part.nbytes + len(part.url or "") for _, part in media_of(asked.messages)))
            async with while_connected(request.receive):
                ids = await context.gateway.intake.tokenize(asked, hold.client)
                shown = await context.parsing.run(hold.client, self._shown, ids) if with_texts else None
        finally:
            hold.release()
        return json_response(
            {
                "count": len(ids),
                "max_model_len": context.gateway.registry.max_positions("thinker"),
                "tokens": ids,
                "token_strs": shown,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Answer the text of token ids, without that of special tokens.

        Raises:
            InvalidRequestError: It is invalid.
        """
        context = self._context
        asked = await read_body(request, context, lambda b: read_fields(read_object(b), DetokenizeFields))
        context.require_model(asked.model or context.model)
        text = await context.parsing.run(context.share(request), self._text, asked.tokens)
        return json_response({"prompt": text})

    def _text(self, token_ids: list[int]) -> str:
        prompts = self._context.gateway.prompts
        data = b"".join(prompts.token_bytes(each) for each in token_ids if not prompts.is_special(each))
        return data.decode(errors="replace")

    def _shown(self, token_ids: list[int]) -> list[str]:
        token_bytes = self._context.gateway.prompts.token_bytes
        return [token_bytes(each).decode(errors="replace") for each in token_ids]


def _read(body: bytearray, model: str, max_item_bytes: int) -> tuple[str, bool, GenerateRequest]:
    """Parse and check a body: the model, whether the tokens' texts are wanted, and what is tokenized."""
    values, strings = parse(body, max_item_bytes)
    with_texts = values.pop("return_token_strs", False) is True
    # No tokenizer of these models adds any.
    values.pop("add_special_tokens", None)
    given = Body({"model": model, **values}, strings)
    options, asked = read_chat(given, 1) if "messages" in values else read_completion(given, 1)
    return options.model, with_texts, asked
