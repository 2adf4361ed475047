"""livekit-agents: a realtime session calls a function, and goes on with its result."""

import asyncio
import json
from typing import Literal

from livekit.agents import Agent, AgentSession, FunctionToolsExecutedEvent, function_tool
from livekit_agent import voice_session

calls: list[str] = []


@function_tool
async def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"It is sunny in {city}."


async def main() -> None:
    session: AgentSession = voice_session()
    executed = asyncio.Event()

    @session.on("function_tools_executed")
    def on_executed(_: FunctionToolsExecutedEvent) -> None:
        executed.set()

    await session.start(agent=Agent(instructions="Answer.", tools=[weather]))
    session.generate_reply(user_input="What is twenty plus sixteen?", tool_choice="required")
    async with asyncio.timeout(60):
        await executed.wait()
    await session.aclose()
    print(json.dumps({"calls": calls}))


if __name__ == "__main__":
    asyncio.run(main())
