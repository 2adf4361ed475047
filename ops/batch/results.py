"""The output of ``omnirelay batch``: a folder that a later run resumes from."""

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final, ParamSpec, Self, TypeVar

import msgspec

from omnirelay.client.types import ChatResult
from omnirelay.client.wav import write_wav
from omnirelay.errors import OmniRelayError, OutputError
from ops.batch.prompts import BatchJob

RESULTS: Final = "results.jsonl"
FAILURES: Final = "failures.jsonl"
SPEECH: Final = "speech"
P = ParamSpec("P")
R = TypeVar("R")


class _Done(msgspec.Struct):
    """The part of a result that a later run reads."""

    id: str
    line_sha256: str


class ResultFolder:
    """The folder of results, a context manager; one run at a time writes into it.

    Results are appended, so a killed run loses none that it reported.  Failures are those of the last run.

    Args:
        folder: Created if missing.

    Raises:
        OutputError: It cannot be written, holds something else, or another run writes into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: set[tuple[str, str]] = set()
        with ExitStack() as held:
            self._results = held.enter_context(self._write(self._open_results))
            self._failures: IO[bytes] = held.enter_context(self._write((folder / FAILURES).open, "wb"))
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write(self._held.close)

    def has(self, job: BatchJob) -> bool:
        """Whether an earlier run has answered this exact line."""
        return (job.id, job.digest) in self._done

    def add(self, job: BatchJob, answer: ChatResult) -> None:
        """Write an answer: its speech first, then its line, as docs/batch.md describes it.

        Raises:
            OutputError: It cannot be written.
        """
        done = answer.done
        name = None
        if done.speaker is not None:
            name = f"{SPEECH}/{job.id}.wav"
            write_wav(self._folder / name, answer.waveform)
        self._append(
            self._results,
            id=job.id,
            line_sha256=job.digest,
            text=answer.text,
            speech=name,
            audio_seconds=done.audio_seconds,
            finish_reason=done.finish_reason,
            codec_finish_reason=done.codec_finish_reason,
            seed=done.seed,
            prompt_tokens=done.prompt_tokens,
            text_tokens=len(done.text_token_ids),
            wall_s=done.wall_s,
        )

    def add_failure(self, job: BatchJob, error: OmniRelayError) -> None:
        """Write the reason why a prompt has no answer.

        Raises:
            OutputError: It cannot be written.
        """
        self._append(self._failures, line=job.number, id=job.id, code=error.code, message=str(error))

    def _append(self, file: IO[bytes], **line: Any) -> None:
        # Of a path that is not Unicode, what can be written.
        self._write(file.write, json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._write(file.flush)

    def _open_results(self) -> IO[bytes]:
        (self._folder / SPEECH).mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            file = held.enter_context((self._folder / RESULTS).open("a+b"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"another run writes into {self._folder}") from None
            self._load(file)
            held.pop_all()
        return file

    def _load(self, file: IO[bytes]) -> None:
        """Read which lines have results, and drop the piece of a line that a killed run left at the end."""
        decoder = msgspec.json.Decoder(_Done)
        file.seek(0)
        whole = 0
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break
            whole += len(raw)
            try:
                done = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise OutputError(
                    f"{self._folder / RESULTS}, line {number} is no result of a batch; choose another folder"
                ) from error
            self._done.add((done.id, done.line_sha256))
        file.truncate(whole)
        file.seek(0, os.SEEK_END)

    def _write(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return act(*args, **kwargs)
        except OSError as error:
            raise OutputError(f"cannot write into {self._folder}: {error.strerror}") from error
