"""litellm: a chat, a stream, speech, a transcript, a response."""

import base64
import json
import os
from pathlib import Path

# Else it asks the internet for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

QUESTION = "What is twenty plus sixteen?"
WHERE = {"model": "openai/omnirelay", "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
MESSAGES = [{"role": "user", "content": QUESTION}]

if __name__ == "__main__":
    answer = litellm.completion(messages=MESSAGES, **WHERE)
    vllm = litellm.completion(messages=MESSAGES, **WHERE | {"model": "hosted_vllm/omnirelay"})
    stream = litellm.completion(messages=MESSAGES, stream=True, **WHERE)
    speech = litellm.speech(input="thirty six", voice="alloy", response_format="pcm", **WHERE)
    with Path(os.environ["RECORDING"]).open("rb") as file:
        transcript = litellm.transcription(file=file, **WHERE)
    response = litellm.responses(input=QUESTION, **WHERE)
    print(
        json.dumps(
            {
                "chat": answer.choices[0].message.content,
                "as vllm": vllm.choices[0].message.content,
                "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
                "speech": base64.b64encode(speech.content).decode(),
                "transcript": transcript.text,
                "response": response.output[0].content[0].text,
            }
        )
    )
