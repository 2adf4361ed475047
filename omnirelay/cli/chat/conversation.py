"""A conversation: the turns so far, and the attachments of the next message."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omnirelay.cli.chat.answer import Listener, Recorder, stream
from omnirelay.cli.chat.camera import Camera
from omnirelay.cli.output import note
from omnirelay.cli.target import Target
from omnirelay.client.media import audio, image, video
from omnirelay.client.player import Playback, Player
from omnirelay.client.wav import write_wav
from omnirelay.content import AudioPart, ChatMessage, ContentPart, ImagePart, TextPart, VideoPart
from omnirelay.errors import (
    InvalidRequestError,
    MediaTooLargeError,
    OmniRelayError,
    PromptTooLongError,
    UnknownSpeakerError,
)
from omnirelay.protocol import GenerateRequest
from omnirelay.status import StatusReport
from omnirelay.values import SAMPLE_BYTES, SAMPLE_RATE, MediaKind

Attachment = AudioPart | ImagePart | VideoPart
_MAKE: Final[Mapping[MediaKind, Callable[[str], Attachment]]] = {
    "audio": audio,
    "image": image,
    "video": video,
}


@dataclass(eq=False)
class ChatSession:
    """Keeps the turns, and sends all of them with each request (the template, which has no turns).

    Every request has its own connection, so the gateway may be restarted in between.  ``_make_printers``
    gives what shows one answer.
    """

    _target: Target
    _template: GenerateRequest
    _make_printers: Callable[[], Sequence[Listener]]
    _player: Player | None
    _camera: Camera | None = None
    _turns: list[ChatMessage] = field(default_factory=list)
    _attached: list[Attachment] = field(default_factory=list)
    _playback: Playback | None = None
    _speech: bytes | None = None

    @property
    def playing(self) -> bool:
        """Speech of the last answer is still playing."""
        return self._playback is not None and self._playback.playing

    @property
    def attached(self) -> bool:
        """The next message has attachments."""
        return bool(self._attached)

    def status(self) -> StatusReport:
        """Ask for the gateway's status.

        Raises:
            OmniRelayError: It does not answer.
        """
        return asyncio.run(self._target.status())

    def attach(self, kind: MediaKind, source: str) -> str:
        """Attach a file or ``https:`` URL to the next message; returns its name there.

        Raises:
            MediaError: It cannot be read.
        """
        part = _MAKE[kind](os.path.expanduser(source))
        self._attached.append(part)
        # As the gateway counts them, in the whole conversation.
        earlier = (part for turn in self._turns if not isinstance(turn.content, str) for part in turn.content)
        number = sum(getattr(each, "kind", None) == kind for each in (*earlier, *self._attached))
        return f"{kind} {number}"

    def choose_voice(self, name: str) -> None:
        """Use this voice from now on.

        Raises:
            UnknownSpeakerError: The checkpoint has no such voice.
            OmniRelayError: The gateway does not answer.
        """
        known = self.voices()
        if known and name not in known:
            raise UnknownSpeakerError(f"no voice {name!r}; this checkpoint has {', '.join(known)}")
        self._template = replace(self._template, speaker=name)

    def voices(self) -> list[str]:
        """The checkpoint's voices; empty until a stage has reported them.

        Raises:
            OmniRelayError: The gateway does not answer.
        """
        return sorted({name for stage in self.status().stages for name in stage.limits.speakers})

    def save(self, path: Path) -> float:
        """Write the speech of the last answer as WAV; returns its length in seconds.

        Raises:
            InvalidRequestError: There is none.
            OutputError: The file cannot be written.
        """
        if self._speech is None:
            raise InvalidRequestError("there is no speech to save yet")
        write_wav(path, self._speech)
        return len(self._speech) / SAMPLE_BYTES / SAMPLE_RATE

    def forget(self) -> None:
        """Drop all turns and attachments."""
        self._turns.clear()
        self._attached.clear()
        self._speech = None

    def ask(self, text: str) -> None:
        """Send a message with its attachments, and show the answer.

        An interrupted answer stays in the conversation; a failed turn does not.

        Raises:
            OmniRelayError: The turn failed.
            KeyboardInterrupt: The user stopped the answer.
        """
        self.hush()
        content: str | list[ContentPart] = text
        seen = [self._camera.picture()] if self._camera else []
        files, self._attached = self._attached, []
        if seen or files:
            content = [*seen, *files, *([TextPart(text)] if text else [])]
        message = ChatMessage("user", content)
        recorder = Recorder()
        listeners: list[Listener] = [recorder, *self._make_printers()]
        if self._player is not None:
            self._playback = Playback(self._player)
            listeners.insert(0, self._playback)
        try:
            messages = [*self._template.messages, *self._turns, message]
            asyncio.run(stream(self._target, replace(self._template, messages=messages), listeners))
        except KeyboardInterrupt:
            self.hush()
            if recorder.text:
                self._keep(message, recorder)
            raise
        except OmniRelayError as error:
            self.hush()
            too_long = PromptTooLongError if self._camera is None else PromptTooLongError | MediaTooLargeError
            if isinstance(error, too_long) and self._turns:
                error.add_note("the conversation is too long: /new starts a new one")
            if files:
                error.add_note("the message failed: attach its files again")
            raise
        self._keep(message, recorder)
        if self._playback is not None:
            self._playback.end()

    def hear_out(self) -> None:
        """Wait until the speech has been played."""
        if self._playback is not None:
            self._playback.wait()

    def hush(self) -> None:
        """Stop playing the last answer."""
        if self._playback is not None:
            self._playback.stop()

    def check_player(self) -> None:
        """Report a failed player; it is not used again."""
        if self._playback is not None and self._playback.problem:
            note(f"speech is no longer played: {self._playback.problem}")
            self._player = self._playback = None

    def _keep(self, message: ChatMessage, recorder: Recorder) -> None:
        self._turns += [message, ChatMessage("assistant", recorder.text)]
        if recorder.waveform:
            self._speech = recorder.waveform
