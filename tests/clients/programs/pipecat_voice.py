"""pipecat: the example's bot of STT, LLM and TTS, and streaming recognition, both spoken to."""

import asyncio
import json
import os
import sys
import wave
from collections.abc import Callable

from loguru import logger
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import (
    ErrorFrame,
    InputAudioRawFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.audio.vad_processor import VADProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.workers.runner import WorkerRunner
from pipecat_bot import pipeline

URL = os.environ["OPENAI_BASE_URL"]
RATE = 16000


def streamed() -> Pipeline:
    """Streaming recognition; a detector in the pipeline ends turns."""
    recognizer = OpenAIRealtimeSTTService(api_key="none", base_url=URL.replace("http", "ws", 1) + "/realtime")
    return Pipeline([VADProcessor(vad_analyzer=SileroVADAnalyzer()), recognizer])


class Watch(BaseObserver):
    """Notes what passes, once for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.heard = self.said = ""
        self.seconds = 0.0
        self.errors: list[str] = []

    async def on_push_frame(self, data: FramePushed) -> None:
        frame = data.frame
        if frame.id in self.seen:
            return
        self.seen.add(frame.id)
        if isinstance(frame, TranscriptionFrame):
            self.heard += frame.text
        elif isinstance(frame, LLMTextFrame):
            self.said += frame.text
        elif isinstance(frame, TTSAudioRawFrame):
            self.seconds += len(frame.audio) / 2 / frame.sample_rate
        elif isinstance(frame, ErrorFrame):
            self.errors.append(frame.error)


def answered(watch: Watch) -> bool:
    return watch.seconds > 1 and "fifteen" in watch.said


def transcribed(watch: Watch) -> bool:
    return bool(watch.heard)


async def converse(bot: Pipeline, enough: Callable[[Watch], bool]) -> Watch:
    watch = Watch()
    worker = PipelineWorker(
        bot, params=PipelineParams(audio_in_sample_rate=RATE), observers=[watch], idle_timeout_secs=None
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    with wave.open(os.environ["RECORDING"]) as file:
        question = file.readframes(file.getnframes())
    step = 2 * RATE // 50
    # Nobody speaks while the bot still connects, and a busy server answers late.
    pcm = bytes(step * 50) + question + bytes(step * 5000)
    for begin in range(0, len(pcm) - step, step):
        await worker.queue_frame(InputAudioRawFrame(pcm[begin : begin + step], RATE, 1))
        await asyncio.sleep(0.02)
        if watch.errors or enough(watch):
            break
    await worker.cancel()
    await running
    return watch


async def main() -> None:
    told = {}
    for name, bot, enough in (("bot", pipeline([], []), answered), ("streamed", streamed(), transcribed)):
        watch = await converse(bot, enough)
        told[name] = {
            "heard": watch.heard,
            "said": watch.said,
            "seconds": watch.seconds,
            "errors": watch.errors,
        }
    print(json.dumps(told))


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, level=os.environ.get("LEVEL", "WARNING"))
    asyncio.run(main())
