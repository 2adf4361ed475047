"""The model calls a function: OpenAI's Python client asks, calls, and tells the result.

Needs `pip install openai`.
"""

import argparse
import json
from typing import Literal, cast

from openai import OpenAI
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessage,
    ChatCompletionMessageParam,
)

WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Berlin", "Nairobi"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def weather(place: str) -> str:
    """Stand in for a real service."""
    return {"Berlin": "rain, 8 degrees", "Nairobi": "sun, 24 degrees"}[place]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("question", nargs="?", default="How is the weather in Nairobi?")
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--api-key", default="none", help="where the server asks for keys")
parser.add_argument("--choice", choices=["auto", "required"], default="auto", help="whether it has to call")
parser.add_argument("--max-tokens", type=int, default=256)
arguments = parser.parse_args()

with OpenAI(base_url=arguments.url, api_key=arguments.api_key) as client:
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": arguments.question}]

    def ask(choice: Literal["auto", "required", "none"]) -> ChatCompletionMessage:
        """Ask what follows the messages."""
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[WEATHER],
            tool_choice=choice,
            max_completion_tokens=arguments.max_tokens,
        )
        return completion.choices[0].message

    message = ask(arguments.choice)
    if message.tool_calls:
        # What was answered is part of the conversation.
        messages.append(cast("ChatCompletionMessageParam", message.model_dump(exclude_none=True)))
        for call in message.tool_calls:
            if call.type == "function":
                told = weather(**json.loads(call.function.arguments))
                print(f"{call.function.name}({call.function.arguments}): {told}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
        message = ask("none")
    print(message.content)
