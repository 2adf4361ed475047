"""pipecat: its LLM service and its realtime service call a function, and go on with its result."""

import asyncio
import json
import os
import sys

from loguru import logger
from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.frames.frames import ErrorFrame, LLMRunFrame
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.llm_service import FunctionCallParams, LLMService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.workers.runner import WorkerRunner
from pipecat_bot import WHERE

MESSAGE = {"role": "user", "content": "What is twenty plus sixteen?"}
CALLS = 2
"""A call is required of each answer: the second is in the answer to the first one's result."""


def realtime() -> LLMService:
    return OpenAIRealtimeLLMService(
        api_key="none",
        base_url=WHERE["base_url"].replace("http", "ws", 1) + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(
            model="omnirelay", session_properties=SessionProperties(tool_choice="required")
        ),
    )


class Failures(BaseObserver):
    """Ends the wait when the service reports an error."""

    def __init__(self, done: "asyncio.Future[None]") -> None:
        super().__init__()
        self.done = done

    async def on_push_frame(self, data: FramePushed) -> None:
        if isinstance(data.frame, ErrorFrame) and not self.done.done():
            self.done.set_exception(RuntimeError(data.frame.error))


async def converse(service: LLMService) -> list[str]:
    calls: list[str] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def weather(call: FunctionCallParams) -> None:
        calls.append(call.arguments["city"])
        await call.result_callback({"weather": "sunny"})
        if len(calls) == CALLS and not done.done():
            done.set_result(None)

    city = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
    tool = FunctionSchema("weather", "The weather of a city.", city, ["city"], handler=weather)
    turns = LLMContextAggregatorPair(LLMContext([MESSAGE], tools=[tool], tool_choice="required"))
    worker = PipelineWorker(
        Pipeline([turns.user(), service, turns.assistant()]),
        observers=[Failures(done)],
        idle_timeout_secs=None,
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await worker.queue_frame(LLMRunFrame())
    try:
        async with asyncio.timeout(60):
            await done
    finally:
        await worker.cancel()
        await running
    return calls[:CALLS]


async def main() -> None:
    chat = OpenAILLMService(**WHERE, settings=OpenAILLMService.Settings(model="omnirelay"))
    response = OpenAIResponsesLLMService(
        **WHERE,
        ws_url=WHERE["base_url"].replace("http", "ws", 1) + "/responses",
        # It does not pass on the tool_choice of a context.
        settings=OpenAIResponsesLLMService.Settings(model="omnirelay", extra={"tool_choice": "required"}),
    )
    called = {
        "chat": await converse(chat),
        "response": await converse(response),
        "realtime": await converse(realtime()),
    }
    print(json.dumps(called))


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, level=os.environ.get("LEVEL", "WARNING"))
    asyncio.run(main())
