"""Open WebUI's backend in front of the server, asked as its page asks it.

Its "slim" form runs, as in its slim image: without engines and models of its own.
"""

import asyncio
import base64
import json
import os
import secrets
import subprocess
from io import BytesIO
from pathlib import Path

import httpx
import soundfile
from conversation import RATE, User, free_port, question, wait_for
from websockets.asyncio.client import ClientConnection, connect

URL = os.environ["OPENAI_BASE_URL"]
MODEL = "speaking"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is twenty plus sixteen?"}]}
SETTINGS = {
    "USE_SLIM_DOCKER": "true",
    "OFFLINE_MODE": "true",
    "DATA_DIR": str(Path.cwd()),
    "WEBUI_SECRET_KEY": secrets.token_hex(32),
    "ENABLE_OLLAMA_API": "false",
    "OPENAI_API_BASE_URL": URL,
    "OPENAI_API_KEY": "none",
    "AUDIO_STT_ENGINE": "openai",
    "AUDIO_STT_OPENAI_API_BASE_URL": URL,
    "AUDIO_STT_OPENAI_API_KEY": "none",
    "AUDIO_STT_MODEL": "omnirelay",
    "AUDIO_TTS_ENGINE": "openai",
    "AUDIO_TTS_OPENAI_API_BASE_URL": URL,
    "AUDIO_TTS_OPENAI_API_KEY": "none",
    "AUDIO_TTS_MODEL": "omnirelay",
    "AUDIO_REALTIME_ENABLED": "true",
    "AUDIO_REALTIME_OPENAI_API_BASE_URL": URL,
    "AUDIO_REALTIME_OPENAI_API_KEY": "none",
    "AUDIO_REALTIME_MODEL": "omnirelay",
    "AUDIO_REALTIME_TRANSCRIPTION_MODEL": "omnirelay",
    # The checkpoint answers the longer default with a minute of speech.
    "REALTIME_CALL_PROMPT_TEMPLATE": "Answer.",
}


def checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise RuntimeError(f"{response.url} answers {response.status_code}: {response.text}")
    return response


def sign_up(client: httpx.Client) -> str:
    """Return the token of the first user, who administers."""
    user = {"name": "A", "email": "a@example.com", "password": secrets.token_hex(16)}
    return str(checked(client.post("/api/v1/auths/signup", json=user)).json()["token"])


def streamed(client: httpx.Client) -> str:
    text = ""
    with client.stream("POST", "/api/chat/completions", json=CHAT | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


def speech(client: httpx.Client) -> tuple[str, int]:
    """Return the samples of 16 bits in base64, and their rate."""
    asked = {"input": "thirty six"}
    file = checked(client.post("/api/v1/audio/speech", json=asked)).content
    samples, rate = soundfile.read(BytesIO(file), dtype="int16")
    return base64.b64encode(samples.tobytes()).decode(), rate


def transcript(client: httpx.Client) -> str:
    with Path(os.environ["RECORDING"]).open("rb") as file:
        sent = {"file": ("recording.wav", file, "audio/wav")}
        return str(checked(client.post("/api/v1/audio/transcriptions", files=sent)).json()["text"])


async def hear(call: ClientConnection, user: User) -> dict[str, object]:
    """Have what was understood answered, then the call's status told, as the page does."""
    understood, answers, seconds = "", [], []
    async for message in call:
        event = json.loads(message)
        match event["type"]:
            case "bridge.error":
                raise RuntimeError(event["message"])
            case "conversation.item.input_audio_transcription.completed":
                understood = event["transcript"]
                await call.send(json.dumps({"type": "bridge.respond", "item_id": event["item_id"]}))
            case "response.created":
                seconds.append(0.0)
            case "response.output_audio.delta":
                seconds[-1] += len(base64.b64decode(event["delta"])) / 2 / RATE
                user.hear(0)
            case "response.output_audio_transcript.done":
                answers.append(event["transcript"])
            case "response.done" if event["response"]["status"] != "completed":
                raise RuntimeError(event["response"])
            case "response.done" if len(seconds) == 1:
                await call.send(json.dumps({"type": "bridge.status", "status": "working"}))
            case "response.done":
                return {"understood": understood, "answers": answers, "seconds": seconds}
    raise RuntimeError("the call was closed")


async def speak(call: ClientConnection, user: User) -> None:
    async for piece in user.microphone():
        audio = base64.b64encode(piece).decode()
        await call.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))


async def converse(url: str, token: str) -> dict[str, object]:
    """Ask a question in a call."""
    user = User([question(os.environ["RECORDING"])])
    async with connect(f"{url.replace('http', 'ws', 1)}/api/v1/audio/realtime") as call:
        await call.send(json.dumps({"type": "auth", "token": token, "model_id": MODEL}))
        ready = json.loads(await call.recv())
        if ready["type"] != "bridge.ready":
            raise RuntimeError(ready)
        # The second snapshot of the chat replaces the first one.
        for messages in CHAT["messages"], []:
            await call.send(json.dumps({"type": "bridge.context", "messages": messages}))
        others = [asyncio.create_task(each) for each in (user.converse(), speak(call, user))]
        heard = await hear(call, user)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return heard


def ask(url: str, backend: subprocess.Popen[bytes]) -> dict[str, object]:
    with httpx.Client(base_url=url, timeout=60) as client:
        wait_for(f"{url}/health", backend)
        token = sign_up(client)
        client.headers["Authorization"] = f"Bearer {token}"
        models = checked(client.get("/api/models")).json()["data"]
        answer = checked(client.post("/api/chat/completions", json=CHAT)).json()
        read, rate = speech(client)
        return {
            "models": [each["id"] for each in models],
            "chat": answer["choices"][0]["message"]["content"],
            "stream": streamed(client),
            "read": read,
            "rate": rate,
            "transcript": transcript(client),
            "call": asyncio.run(converse(url, token)),
        }


if __name__ == "__main__":
    port = free_port()
    with Path("open-webui.log").open("wb") as log:
        backend = subprocess.Popen(
            ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | SETTINGS,
        )
    try:
        told = ask(f"http://127.0.0.1:{port}", backend)
    except BaseException:
        print(Path("open-webui.log").read_text(encoding="utf-8"))
        raise
    finally:
        backend.kill()
        backend.wait()
    print(json.dumps(told))
