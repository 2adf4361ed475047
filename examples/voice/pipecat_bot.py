"""A Pipecat bot that listens, thinks and speaks by OmniRelay.

pip install "pipecat-ai[openai,silero,runner,webrtc,websocket]"
python pipecat_bot.py               # a page on http://localhost:7860
python pipecat_bot.py -t twilio     # calls by telephone, from Twilio's media streams
"""

import os
from collections.abc import Sequence

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.runner.run import main
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.transports.base_transport import TransportParams
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams
from pipecat.workers.runner import WorkerRunner

WHERE = {
    "base_url": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    "api_key": os.environ.get("OPENAI_API_KEY", "none"),
}

# Pipecat takes 3 s without a sound for the end of speech, for an error if none came before: a busy server is
# slower.  Speech that was sent whole ends at once all the same.
PATIENCE = {"stop_frame_timeout_s": 30.0}


def pipeline(source: Sequence[FrameProcessor], sink: Sequence[FrameProcessor]) -> Pipeline:
    """Put the bot between what brings audio and what plays it."""
    turns = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    return Pipeline(
        [
            *source,
            OpenAISTTService(**WHERE, settings=OpenAISTTService.Settings(model="omnirelay")),
            turns.user(),
            OpenAILLMService(**WHERE, settings=OpenAILLMService.Settings(model="omnirelay")),
            OpenAITTSService(**WHERE, **PATIENCE, settings=OpenAITTSService.Settings(model="omnirelay")),
            *sink,
            turns.assistant(),
        ]
    )


async def bot(arguments: RunnerArguments) -> None:
    """Talk to one caller; Pipecat's runner calls it."""
    audio = {"audio_in_enabled": True, "audio_out_enabled": True}
    transport = await create_transport(
        arguments,
        {"webrtc": lambda: TransportParams(**audio), "twilio": lambda: FastAPIWebsocketParams(**audio)},
    )
    worker = PipelineWorker(pipeline([transport.input()], [transport.output()]))

    @transport.event_handler("on_client_disconnected")
    async def hang_up(*_: object) -> None:
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=arguments.handle_sigint)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    main()
