"""litellm's proxy in front of the server, and OpenAI's package in front of the proxy."""

import base64
import json
import os
import secrets
import subprocess
from pathlib import Path

from conversation import free_port, wait_for
from openai import OpenAI

QUESTION = "What is twenty plus sixteen?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CONFIG = {
    "model_list": [
        {
            "model_name": "omnirelay",
            "litellm_params": {
                "model": "openai/omnirelay",
                "api_base": os.environ["OPENAI_BASE_URL"],
                "api_key": "none",
            },
        }
    ]
}
KEY = f"sk-{secrets.token_hex(32)}"


def ask(url: str) -> dict[str, object]:
    client = OpenAI(base_url=url, api_key=KEY)
    answer = client.chat.completions.create(model="omnirelay", messages=MESSAGES)
    stream = client.chat.completions.create(model="omnirelay", messages=MESSAGES, stream=True)
    spoken = client.chat.completions.create(
        model="omnirelay",
        messages=MESSAGES,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
    )
    read = client.audio.speech.create(
        model="omnirelay", voice="alloy", input="thirty six", response_format="pcm"
    )
    transcript = client.audio.transcriptions.create(model="omnirelay", file=Path(os.environ["RECORDING"]))
    response = client.responses.create(model="omnirelay", input=QUESTION)
    return {
        "chat": answer.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "spoken": spoken.choices[0].message.audio.transcript,
        "speech": spoken.choices[0].message.audio.data,
        "read": base64.b64encode(read.content).decode(),
        "transcript": transcript.text,
        "response": response.output_text,
    }


if __name__ == "__main__":
    Path("proxy.yaml").write_text(json.dumps(CONFIG), encoding="utf-8")
    port = free_port()
    proxy = subprocess.Popen(
        ["litellm", "--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health/liveliness", proxy)
        print(json.dumps(ask(f"http://127.0.0.1:{port}/v1")))
    finally:
        proxy.kill()
        proxy.wait()
