"""``omnirelay chat`` without a text: conversations at a terminal and behind a pipe."""

import json
import re
import wave
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from omnirelay.cli.chat.slash import COMMANDS
from omnirelay.cli.output import WordWrap
from omnirelay.client.wav import pcm16
from shared.families import SPEECH_SYSTEM_PROMPT
from shared.messages import ThinkRequest
from tests.gateway.bench import Bench, Configure, Patch, bench
from tests.gateway.fake_stages import until
from tests.support.media import picture
from tests.support.terminal import CTRL_C, ENTER, make_program, piped, terminal

PICTURE = b"nobody looks into it here"
HANGS = "cat > '{0}/played'; touch '{0}/all'; exec sleep 60"
"""A player that takes its time, as real ones do."""
CHAT = ("-m", "omnirelay.cli", "chat", "--gateway")


def text_of(b: Bench, request: ThinkRequest) -> str:
    tokenizer = b.process._prompts._tokenizer
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def turns(*said: str) -> str:
    """How the prompt of a conversation ends."""
    roles = ["user", "assistant"] * len(said)
    told = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, said, strict=False)]
    return "".join([*told, "<|im_start|>assistant\n"])


async def test_each_line_of_a_pipe_is_a_turn_and_later_ones_hold_the_earlier(served: Bench) -> None:
    status, out, told = await piped(
        *CHAT, served.listen, "--system", "Be brief.", lines=b"Hi\n\n You? \nlast"
    )
    assert (status, out, told) == (0, "Hello there\n" * 3, "")
    prompts = [text_of(served, request) for request in served.stages.requests]
    assert prompts[0].endswith(turns("Hi"))
    assert prompts[1].endswith(turns("Hi", "Hello there", "You?"))
    assert prompts[2].endswith(turns("Hi", "Hello there", "You?", "Hello there", "last"))
    assert all(prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>") for prompt in prompts)


async def test_errors_behind_a_pipe_are_told_and_the_rest_goes_on(served: Bench) -> None:
    lines = b"Hi\n/nothing\n/new now\n/image\n/image nowhere.png\n\xff\n/save a.wav\n/voice Nobody\nBye\n"
    status, out, told = await piped(*CHAT, served.listen, "--text-only", lines=lines)
    assert status == 1
    assert out == "Hello there\n" * 2
    expected = [
        "unknown command /nothing",
        "usage: /new",
        "usage: /image FILE",
        "media_invalid: cannot read nowhere.png",
        "the request cannot be sent",
        "there is no speech",
        "unknown_speaker: no voice 'Nobody'; this checkpoint has Chelsie, Ethan",
    ]
    assert [words for words in expected if words not in told] == []
    assert len(told.splitlines()) == len(expected)
    assert text_of(served, served.stages.requests[-1]).endswith(turns("Hi", "Hello there", "Bye"))


async def test_json_behind_a_pipe(served: Bench) -> None:
    status, out, told = await piped(*CHAT, served.listen, "--json", lines=b"Hi\n/wrong\nBye\n")
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [event["event"] for event in events]
    assert (status, told) == (1, "")
    assert kinds == [*["text", "text", "audio", "audio", "done"], "error", *kinds[:5]]
    assert events[5]["code"] == "invalid_request"


async def test_commands(served: Bench, tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(PICTURE)
    (tmp_path / "out").mkdir()
    lines = b"Hi\n/image 'a picture.png'\nWhat?\n/voice Ethan\n/image a picture.png\n\n/save out/last.wav\n"
    lines += b"/save a\0.wav\n/new\n/save out/none.wav\nAgain\n/voice\n/help\n/quit\nnever sent\n"
    status, out, told = await piped(*CHAT, served.listen, lines=lines, cwd=tmp_path)
    assert (status, out) == (1, "Hello there\n" * 4)
    first, second, third, fourth = served.stages.requests
    assert [len(each.media) for each in (first, second, third, fourth)] == [0, 1, 2, 0]
    picture = "<|vision_bos|><|IMAGE|><|vision_eos|>"
    assert text_of(served, third).endswith(
        turns("Hi", "Hello there", f"{picture}What?", "Hello there", picture)
    )
    voices = [each.speech.speaker for each in served.stages.requests if each.speech is not None]
    assert voices == ["Chelsie", "Chelsie", "Ethan", "Ethan"]
    assert text_of(served, fourth).endswith(f"{SPEECH_SYSTEM_PROMPT}<|im_end|>\n" + turns("Again"))
    with wave.open(str(tmp_path / "out" / "last.wav")) as file:
        assert file.getnframes() == 360
    # Numbered in the whole conversation, as in errors of the gateway.
    assert "image 1 attached to the next message: a picture.png" in told
    assert "image 2 attached to the next message: a picture.png" in told
    assert "there is no speech to save yet" in told
    assert not (tmp_path / "out" / "none.wav").exists()
    assert "voices: Chelsie, Ethan" in told
    assert [name for name in COMMANDS if f"\n{name} " not in told] == []


async def test_files_of_a_failed_message_are_dropped(served: Bench, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    lines = b"/image picture.png\nWhat?\nHi\n"
    status, _, told = await piped(*CHAT, served.listen, "--speaker", "Nobody", lines=lines, cwd=tmp_path)
    assert status == 1
    error, consequence, *_ = told.splitlines()[1:]
    assert "unknown_speaker" in error
    assert "attach its files again" in consequence
    assert told.count("attach its files again") == 1
    assert told.count("unknown_speaker") == 2


async def test_a_conversation_that_becomes_too_long(served: Bench) -> None:
    long = "one two three four five six seven " * 30
    lines = f"Hi\n{long}\n/new\n{long}\nBye\n".encode()
    status, out, told = await piped(*CHAT, served.listen, "--text-only", lines=lines)
    assert (status, out) == (1, "Hello there\n" * 2)
    assert told.count("prompt_too_long") == 2
    assert told.count("/new starts a new one") == 1


async def test_more_pictures_of_a_camera_than_a_request_takes(served: Bench, tmp_path: Path) -> None:
    (tmp_path / "camera.png").write_bytes(picture("png"))
    camera = ("--text-only", "--camera", str(tmp_path / "camera.png"))
    status, _, told = await piped(*CHAT, served.listen, *camera, lines=b"Hi\n" * 17)
    assert (status, len(served.stages.requests)) == (1, 16)
    assert told.count("media_too_large") == told.count("/new starts a new one") == 1
    assert "attach" not in told


async def test_what_would_steer_a_terminal_is_not_shown_on_one(tcp: Bench) -> None:
    tcp.stages.serve(tcp.encode("Hel\x1b]0;mine\x07lo\ttab\r"))
    async with terminal(*CHAT, tcp.listen, "Hi", "--text-only") as shown:
        await shown.see("Hel\ufffd]0;mine\ufffdlo")
        assert await shown.ended() == 0
    status, out, _ = await piped(*CHAT, tcp.listen, "Hi", "--text-only", lines=b"")
    assert status == 0
    assert out.startswith("Hel\x1b]0;mine\x07lo\ttab\r")


async def test_what_stands_in_no_conversation_is_wrong_usage(served: Bench, tmp_path: Path) -> None:
    status, _, told = await piped(*CHAT, served.listen, "--out", "x.wav", lines=b"Hi\n")
    assert status == 2
    assert "/save FILE.wav" in told


async def test_at_a_terminal(served: Bench, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    (tmp_path / "pictures").mkdir()
    history = tmp_path / "kept" / "history"
    chat = (*CHAT, served.listen, "--no-play", "--verbose", "--history", str(history))
    async with terminal(*chat, cwd=tmp_path) as shown:
        await shown.see("speech is not played")
        # Wrapped between words, wherever the path of the checkpoint ends.
        await shown.see("commands\r\n")
        await shown.enter("Hi")
        await shown.see("\nHello there")
        await shown.see("time to first text")
        await shown.enter("/im\tpicture.p\t")
        await shown.see("image 1 attached to the next message: picture.png")
        shown.type("/image pic\t\t\t")
        await shown.see("pictures/")
        shown.type("\x15")
        # The line before the last one, by the arrow key.
        shown.type(f"\x1b[A\x1b[A{ENTER}")
        await shown.see("Hello there")
        shown.type(f"/voice Nobody{ENTER}")
        await shown.see("unknown_speaker")
        await shown.leave()
    second = served.stages.requests[1]
    assert len(second.media) == 1
    assert text_of(served, second).endswith(
        turns("Hi", "Hello there", "<|vision_bos|><|IMAGE|><|vision_eos|>Hi")
    )
    assert history.read_text().splitlines() == ["Hi", "/image picture.png", "Hi", "/voice Nobody"]
    async with terminal(*chat, cwd=tmp_path) as shown:
        await shown.see("> ")
        shown.type("\x1b[A")
        await shown.see("/voice Nobody")
        await shown.interrupt()
        await shown.see("> ")
        await shown.interrupt()
        assert await shown.ended() == 0
    assert len(served.stages.requests) == 2


async def test_ctrl_c_clears_a_line_and_leaves_at_an_empty_one(served: Bench) -> None:
    async with terminal(*CHAT, served.listen, "--text-only") as shown:
        await shown.see("> ")
        shown.type("half a li")
        await shown.see("half a li")
        await shown.interrupt()
        await shown.enter("Hi")
        await shown.see("Hello there")
        await shown.see("> ")
        assert text_of(served, served.stages.requests[0]).endswith(turns("Hi"))
        await shown.interrupt()
        assert await shown.ended() == 0


async def test_a_narrow_terminal_splits_no_word(tcp: Bench) -> None:
    said = " The quick brown fox jumps over the lazy dog and goes on and on."
    tcp.stages.serve(tcp.encode(said))
    async with terminal(*CHAT, tcp.listen, "Hi", "--text-only", COLUMNS="20") as shown:
        assert await shown.ended() == 0
        text, _, _ = shown.seen.replace("\r", "").partition("\n\n")
    lines = as_seen(text)
    assert [word for line in lines for word in line.split()] == said.split()
    assert lines[0].startswith("The ")
    assert max(len(line.rstrip()) for line in lines) <= 20
    async with terminal("-m", "omnirelay.cli", "status", "--gateway", tcp.listen, COLUMNS="40") as shown:
        assert await shown.ended() == 0
        table = shown.seen.replace("\r", "").split("\n")
    assert "  heartbeat: -" in table
    # A path is not broken.
    assert max(len(line) for line in table if not line.startswith("model: ")) <= 40


@pytest.mark.parametrize("size", [1, 3, 200])
def test_words_are_wrapped_as_they_come(size: int, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "Wide words, 日本語 without any space at all, and some more\n" + "x" * 15 + "\nend"
    wrap = WordWrap()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    lines = as_seen("".join(map(wrap.take, pieces)))
    assert [word for line in lines for word in line.split()] == text.split()
    assert max(len(line.rstrip()) for line in lines) < 20
    assert wrap.take("y" * 50).count("y") == 50


def as_seen(written: str) -> list[str]:
    """The lines that a terminal shows."""
    lines = [""]
    for part in re.findall(r"\x1b\[K|\n|\x08|.", written):
        if part == "\n":
            lines.append("")
        elif part == "\b":
            lines[-1] = lines[-1][:-1]
        elif part != "\x1b[K":
            lines[-1] += part
    return lines


async def test_without_a_player_text_is_all_that_is_asked_for(served: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    async with terminal(*CHAT, served.listen, PATH=str(tmp_path / "empty")) as shown:
        await shown.see("no audio player")
        await shown.enter("Hi")
        await shown.see("Hello there")
        await shown.leave()
    assert served.stages.requests[0].speech is None


async def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(tcp: Bench) -> None:
    async with terminal(*CHAT, tcp.listen, "--text-only") as shown:
        await shown.enter("Hi")
        request = await tcp.stages.request(0)
        await tcp.stages.text(request.request_id, 0, tcp.encode("Hello"))
        await shown.see("Hello")
        shown.type(CTRL_C)
        await tcp.stages.aborted(request.request_id)
        await shown.see("stopped")
        await until(lambda: tcp.counts["cancelled"] == 1)
        await shown.enter("Go on")
        second = await tcp.stages.request(1)
        assert text_of(tcp, second).endswith(turns("Hi", "Hello", "Go on"))
        shown.type(CTRL_C)
        await shown.see("stopped")
        shown.type(f"/quit{ENTER}")
        assert await shown.ended() == 0


async def test_a_gateway_that_comes_back_goes_on_with_the_conversation(configure: Configure) -> None:
    config = configure()

    async with AsyncExitStack() as first:
        b = await first.enter_async_context(bench(config))
        b.stages.serve(b.encode("Hello there"))
        async with terminal(*CHAT, b.listen, "--text-only") as shown:
            await shown.enter("Hi")
            await shown.see("Hello there")
            await first.aclose()
            shown.type(f"Lost{ENTER}")
            await shown.see("gateway_unreachable")
            async with bench(config) as again:
                again.stages.serve(again.encode("Welcome back"))
                shown.type(f"You?{ENTER}")
                await shown.see("Welcome back")
                assert text_of(again, again.stages.requests[0]).endswith(turns("Hi", "Hello there", "You?"))
                await shown.leave()


async def test_speech_is_played_until_ctrl_c(served: Bench, tmp_path: Path) -> None:
    """The player does not die of our Ctrl-C itself."""
    make_program(tmp_path / "bin" / "aplay", HANGS.format(tmp_path))
    async with terminal(*CHAT, served.listen, "--verbose", PATH=str(tmp_path / "bin")) as shown:
        await shown.see("player: aplay")
        await shown.enter("Hi")
        await until((tmp_path / "all").exists)
        assert (tmp_path / "played").stat().st_size == 4 * 360
        await shown.see("> ")
        await shown.interrupt()
        await shown.enter("Again")
        await shown.see("Hello there")
        await shown.leave()


async def test_a_player_that_dies_is_told_once(served: Bench, tmp_path: Path) -> None:
    make_program(tmp_path / "bin" / "aplay", "echo no sound card >&2; exit 3")
    env = {"PATH": str(tmp_path / "bin")}
    status, out, told = await piped(*CHAT, served.listen, "--play", lines=b"Hi\nAgain\n", env=env)
    assert (status, out) == (0, "Hello there\n" * 2)
    assert told == "speech is no longer played: aplay ended with exit status 3: no sound card\n"


async def test_every_answer_behind_a_pipe_is_played_to_its_end(served: Bench, tmp_path: Path) -> None:
    make_program(tmp_path / "bin" / "aplay", f"cat >> '{tmp_path}/played'")
    env = {"PATH": str(tmp_path / "bin")}
    status, _, told = await piped(*CHAT, served.listen, "--play", lines=b"Hi\nAgain\n", env=env)
    assert (status, told) == (0, "")
    assert (tmp_path / "played").read_bytes() == 2 * (bytes(4 * 240) + b"\0\0\0\x3f" * 120)


async def test_a_player_that_hangs_delays_no_text(served: Bench, tmp_path: Path) -> None:
    make_program(tmp_path / "bin" / "aplay", HANGS.format(tmp_path))
    out = tmp_path / "speech.wav"
    async with terminal(*CHAT, served.listen, "Hi", "--out", str(out), PATH=str(tmp_path / "bin")) as shown:
        await shown.see("Hello there")
        await shown.see("wall time")
        await until((tmp_path / "all").exists)
        await shown.interrupt()
        assert await shown.ended() == 130
    async with terminal(*CHAT, served.listen, "Hi", "--no-play", PATH=str(tmp_path / "bin")) as shown:
        assert await shown.ended() == 0
    with wave.open(str(out)) as file:
        assert pcm16((tmp_path / "played").read_bytes()) == file.readframes(file.getnframes())


@pytest.mark.parametrize("arguments", [["--play"], ["Hi", "--play"]])
async def test_play_without_a_player_is_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    status, _, told = await piped(*CHAT[:-1], *arguments, lines=b"", env={"PATH": str(tmp_path)})
    assert status == 2
    assert "--play needs one of paplay" in told
