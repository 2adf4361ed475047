"""openai-agents: a realtime session calls a function."""

import asyncio
import json
import os
from typing import Literal

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

set_tracing_disabled(True)
calls: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"It is sunny in {city}."


async def main() -> None:
    runner = RealtimeRunner(
        RealtimeAgent(name="Assistant", instructions="Answer.", tools=[weather]),
        config={"model_settings": {"model_name": "omnirelay", "tool_choice": "required"}},
    )
    url = os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime?model=omnirelay"
    async with await runner.run(model_config={"url": url, "api_key": "none"}) as session, asyncio.timeout(60):
        await session.send_message("What is twenty plus sixteen?")
        async for event in session:
            if event.type == "error":
                raise RuntimeError(event.error)
            # The next response would have to call, too.
            if event.type == "tool_end":
                break
    print(json.dumps({"calls": calls[:1]}))


if __name__ == "__main__":
    asyncio.run(main())
