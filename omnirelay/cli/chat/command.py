"""``omnirelay chat``: one request or a conversation."""

import argparse
import asyncio
import os
import stat
import sys
from contextlib import ExitStack, nullcontext

from omnirelay.cli.chat import terminal
from omnirelay.cli.chat.answer import FiguresPrinter, JsonPrinter, Listener, TextPrinter, WavWriter, stream
from omnirelay.cli.chat.camera import Camera
from omnirelay.cli.output import note
from omnirelay.cli.target import target_of
from omnirelay.client.player import PLAYER_NAMES, Playback, Player, find_player
from omnirelay.client.request import Prompt, build_request
from omnirelay.client.wav import require_wav
from omnirelay.protocol import GenerateRequest, SamplingOverrides


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        OmniRelayError: It failed.
        SystemExit: There is nothing to send, or two options exclude each other.
    """
    alone = arguments.text is None and not (arguments.audio or arguments.image or arguments.video)
    if alone and not _has_input():
        arguments.refuse_usage("give TEXT, --audio, --image or --video, or lines on standard input")
    if alone and arguments.out is not None:
        arguments.refuse_usage("--out goes with TEXT; a conversation has /save FILE.wav")
    if arguments.out is not None and arguments.text_only:
        arguments.refuse_usage("--text-only gives no speech for --out")
    player = _choose_player(arguments)
    if arguments.verbose:
        note(f"player: {player.program}" if player else "speech is not played")
    if arguments.out is not None:
        require_wav(arguments.out)
    with Camera(arguments.camera) if arguments.camera else nullcontext() as camera:
        if alone:
            return terminal.run(arguments, _request(arguments, []), player, camera)
        if camera is not None:
            arguments.image.append(camera.picture())
        _send(arguments, player)
    return 0


def _send(arguments: argparse.Namespace, player: Player | None) -> None:
    listeners: list[Listener] = [JsonPrinter()] if arguments.json else [TextPrinter(), FiguresPrinter()]
    if arguments.out is not None:
        # The file is there before the end is shown.
        listeners.insert(0, WavWriter(arguments.out))
    with ExitStack() as stack:
        if player is not None:
            playback = stack.enter_context(Playback(player))
            listeners.insert(0, playback)
        asyncio.run(stream(target_of(arguments), _request(arguments, arguments.text or ""), listeners))
    if arguments.out is not None and not arguments.json:
        note(f"written: {arguments.out}")
    if player is not None and playback.problem:
        note(f"the speech was not played completely: {playback.problem}")


def _request(arguments: argparse.Namespace, prompt: Prompt) -> GenerateRequest:
    temperature = 0.0 if arguments.greedy else None
    return build_request(
        prompt,
        audio=arguments.audio,
        images=arguments.image,
        videos=arguments.video,
        system=arguments.system,
        use_audio_in_video=arguments.use_audio_in_video,
        speech=not arguments.text_only,
        voice=arguments.voice,
        seed=arguments.seed,
        text_sampling=SamplingOverrides(temperature=temperature, max_tokens=arguments.max_tokens),
        codec_sampling=SamplingOverrides(temperature=temperature, max_tokens=arguments.max_codec_tokens),
    )


def _choose_player(arguments: argparse.Namespace) -> Player | None:
    wanted: bool | None = arguments.play
    if wanted is None:
        wanted = sys.stdout.isatty() and not arguments.json
    if arguments.text_only or not wanted:
        return None
    if (player := find_player()) is None:
        if arguments.play:
            arguments.refuse_usage(f"--play needs one of {PLAYER_NAMES} on PATH")
        if arguments.out is None:
            # Nobody would hear it, and the prompt would wait for its end.
            arguments.text_only = True
            note(f"no audio player ({PLAYER_NAMES}): text only; --no-play generates the speech all the same")
    return player


def _has_input() -> bool:
    """Whether standard input may have lines: a terminal, a pipe or a file, but not /dev/null."""
    try:
        return sys.stdin.isatty() or not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):
        # Missing, closed or replaced.
        return False
