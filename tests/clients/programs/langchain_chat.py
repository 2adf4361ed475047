"""langchain: a chat, a stream, a function, structured output."""

import json
import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is twenty plus sixteen?"
model = ChatOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none", model="omnirelay")


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


class Parity(BaseModel):
    parity: Literal["even", "odd"]


if __name__ == "__main__":
    asked = model.bind_tools([weather], tool_choice="weather").invoke(QUESTION)
    print(
        json.dumps(
            {
                "chat": model.invoke(QUESTION).content,
                "stream": "".join(str(chunk.content) for chunk in model.stream(QUESTION)),
                "arguments": asked.tool_calls[0]["args"],
                "function": asked.tool_calls[0]["name"],
                "structured": model.with_structured_output(Parity).invoke(QUESTION).parity,
            }
        )
    )
