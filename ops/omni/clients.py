"""Clients that start a stack, and stop it; what their ``generate`` takes and returns."""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import msgspec

from omnirelay import (
    AsyncAnswer,
    AsyncClient,
    ChatMessage,
    ChatResult,
    Client,
    GenerateRequest,
    build_request,
)
from omnirelay.cli.progress import ProgressLine
from omnirelay.client.answer import OpenAnswer
from omnirelay.client.request import taking_options_of
from omnirelay.errors import InvalidRequestError, OmniRelayError
from omnirelay.tasks import all_of
from ops.batch.runner import Tally, concurrency_of, patient_answer
from ops.omni.stack import OwnStack

OmniPrompt = str | Mapping[str, Any] | GenerateRequest
"""A text; options of ``chat`` in a dict, with ``text`` or ``messages``; or a whole request."""
Prompts = OmniPrompt | Iterable[OmniPrompt]


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
        """Build the request, and read its files.

        Raises:
            InvalidRequestError: An option is of another type, or goes with no other.
            MediaError: A file cannot be read.
        """
        try:
            return build_request(*self._call.args, **self._call.kwargs)
        except TypeError as error:
            raise InvalidRequestError(str(error)) from error


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Say in an error which prompt it is of."""
    try:
        yield
    except (OmniRelayError, TypeError) as error:
        error.add_note(f"prompt {number} failed, counted from 0")
        raise


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


class AsyncOmni(AsyncClient):
    """A client with a stack of its own; use it with ``async with``.

    Args:
        model: A directory or a hub id; None is that of the environment, or the default checkpoint.
        voice: The voice of answers that name none.
        log: File of what the stack's processes say; None is a temporary one, which stays only if an error
            names it.
        configuration: Keys of the configuration: ``stages={"thinker": {"threads": 2}}``, ``text_only=True``.
            The environment's hold too, except its addresses.

    Attributes:
        log: The file of what the stack's processes say; errors of a stack that has failed name it.

    Raises:
        ConfigError: A key or value of the configuration is not allowed.
        OutputError: The log cannot be written.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        voice: str | None = None,
        log: str | Path | None = None,
        **configuration: Any,
    ) -> None:
        self._stack = OwnStack(model, configuration, log)
        self._voice = voice
        self.log = self._stack.log
        target = self._stack.target
        super().__init__(target.addresses, target.api_key, target.ca, target.reconnect_s)

    async def connect(self) -> None:
        """Start the stack, and wait until it serves; a terminal shows that.

        Raises:
            StageStartError: It did not start; the message names the log.
        """
        try:
            with ProgressLine(lambda: "starting the stack"):
                await self._stack.start()
            await super().connect()
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def close(self) -> None:
        """Cancel open requests, and stop the stack."""
        await super().close()
        await self._stack.stop()

    @taking_options_of(build_request)
    def chat(self, request: GenerateRequest) -> AsyncAnswer:
        """Send a request, as :meth:`omnirelay.AsyncClient.chat`; a stack without speech gets it without."""
        if self._stack.config.text_only and request.say is None:
            request = msgspec.structs.replace(request, speech=False)
        elif request.speech and request.speaker is None:
            request = msgspec.structs.replace(request, speaker=self._voice)
        return super().chat(request)

    @overload
    async def generate(
        self, prompts: Prompts, *, errors: Literal["raise"] = "raise", progress: bool = True, **options: Any
    ) -> list[OmniAnswer]: ...

    @overload
    async def generate(
        self, prompts: Prompts, *, errors: Literal["return"], progress: bool = True, **options: Any
    ) -> list[OmniAnswer | OmniRelayError]: ...

    async def generate(
        self,
        prompts: Prompts,
        *,
        errors: Literal["raise", "return"] = "raise",
        progress: bool = True,
        **options: Any,
    ) -> Any:
        """Answer prompts, as many at once as the stages compute.

        Args:
            prompts: Texts; dicts with ``text`` or ``messages``, and options of :meth:`chat`; requests.  Or
                one of these.
            errors: ``raise`` the first error, which cancels what is open; or ``return`` it in the place of
                the answer.
            progress: Show progress at a terminal.
            options: Options of :meth:`chat` for all prompts.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            TypeError: ``errors`` has another value, or a prompt an unknown option; nothing has been sent.
            OmniRelayError: A prompt failed.
        """
        if errors not in ("raise", "return"):
            raise TypeError(f"errors can be 'raise' or 'return', not {errors!r}")
        if isinstance(prompts, str | Mapping | GenerateRequest):
            prompts = [prompts]
        prepared: list[Prepared] = []
        for prompt in prompts:
            with _named(len(prepared)):
                prepared.append(Prepared(prompt, options))
        tally, slots = Tally(len(prepared)), asyncio.Semaphore(concurrency_of(self._stack.config))

        async def answer(number: int) -> OmniAnswer | OmniRelayError:
            async with slots:
                try:
                    with _named(number):
                        request = await asyncio.to_thread(prepared[number].request)
                        result = await patient_answer(self, request)
                except OmniRelayError as error:
                    if errors == "raise":
                        raise
                    tally.failed += 1
                    return error
            tally.answered += 1
            return OmniAnswer(result.text, result.waveform, result.done, prepared[number])

        with ProgressLine(lambda: tally.estimate if progress else ""):
            return await all_of(answer(number) for number in range(len(prepared)))

    def _on_interrupted(self, answer: OpenAnswer, error: OmniRelayError, wait_s: float) -> None:
        if not self._closed:
            error.add_note(self._stack.name_log())
        super()._on_interrupted(answer, error, wait_s)


class Omni(Client):
    """A client with a stack of its own; use it with ``with``, or call :meth:`close`.

    The stack is stopped with this process at the latest.  Arguments, attributes and errors are those of
    :class:`AsyncOmni`; the stack serves when this returns.

    Raises:
        StageStartError: The stack did not start; the message names the log.
    """

    _client: AsyncOmni

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        voice: str | None = None,
        log: str | Path | None = None,
        **configuration: Any,
    ) -> None:
        client = AsyncOmni(model, voice=voice, log=log, **configuration)
        self.log = client.log
        self._begin(client)
        weakref.finalize(self, _close, self._stop, self._thread)

    @overload
    def generate(
        self, prompts: Prompts, *, errors: Literal["raise"] = "raise", progress: bool = True, **options: Any
    ) -> list[OmniAnswer]: ...

    @overload
    def generate(
        self, prompts: Prompts, *, errors: Literal["return"], progress: bool = True, **options: Any
    ) -> list[OmniAnswer | OmniRelayError]: ...

    def generate(self, prompts: Prompts, **options: Any) -> Any:
        """Answer prompts; as :meth:`AsyncOmni.generate`."""
        return self.call(self._client.generate(prompts, **options))


def _close(stop: Callable[[], object], thread: threading.Thread) -> None:
    """Stop the stack of an :class:`Omni` that was not closed: its thread does, when it ends."""
    stop()
    # The garbage collector may call this on that thread, which cannot wait for itself.
    if threading.current_thread() is not thread:
        thread.join()
