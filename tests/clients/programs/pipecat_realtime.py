"""pipecat: a bot of the realtime service."""

import asyncio
import os
import sys

from conversation import RATE, User, first_of, main
from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner


class Speaker(FrameProcessor):
    """Plays to the user, in real time."""

    def __init__(self, user: User) -> None:
        super().__init__()
        self._user = user
        self._said = ""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._user.hear(len(frame.audio) / 2 / frame.sample_rate)
        elif isinstance(frame, InterruptionFrame):
            self._user.stop()
        elif isinstance(frame, TTSStoppedFrame):
            self._user.end()
        elif isinstance(frame, LLMTextFrame):
            self._said += frame.text
        elif isinstance(frame, LLMFullResponseEndFrame):
            self._user.said.append(self._said)
            self._said = ""
        await self.push_frame(frame, direction)


def pipeline(user: User) -> Pipeline:
    turns = LLMContextAggregatorPair(LLMContext())
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model="omnirelay"),
    )
    return Pipeline([turns.user(), service, Speaker(user), turns.assistant()])


async def talk(user: User) -> None:
    worker = PipelineWorker(
        pipeline(user), params=PipelineParams(audio_in_sample_rate=RATE), idle_timeout_secs=None
    )
    failed = asyncio.get_running_loop().create_future()

    @worker.event_handler("on_pipeline_error")
    async def on_error(_: PipelineWorker, frame: ErrorFrame) -> None:
        if not failed.done():
            failed.set_exception(RuntimeError(frame.error))

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await first_of(asyncio.shield(running), speak(worker, user), user.converse(), failed)
    finally:
        await worker.cancel()
        await running


async def speak(worker: PipelineWorker, user: User) -> None:
    async for piece in user.microphone():
        await worker.queue_frame(InputAudioRawFrame(piece, RATE, 1))


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, level=os.environ.get("LEVEL", "WARNING"))
    main(talk)
