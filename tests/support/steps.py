"""What a scheduler did, step by step."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.v1.core.sched.scheduler import Scheduler


class StepRecord:
    """Notes the scheduled tokens and the preemptions of a scheduler's requests, by the client's name.

    Attributes:
        scheduled: Tokens per request, one entry a step.
        preemptions: How often each request was preempted.
        blocks: Blocks of the KV cache that were free when the record was made.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.scheduled: list[dict[str, int]] = []
        self.preemptions: Counter[str] = Counter()
        self.blocks = self.free_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no living request holds."""
        count: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    @contextmanager
    def watch(self, name_of: Callable[[str], str]) -> Iterator[None]:
        """Record the step made in this context; ``name_of`` gives the client's name for the engine's."""
        schedule = self._scheduler.schedule

        def note(*arguments: Any) -> Any:
            output = schedule(*arguments)
            counts = output.num_scheduled_tokens
            self.scheduled.append({name_of(engine_id): count for engine_id, count in counts.items()})
            for engine_id, request in self._scheduler.requests.items():
                if request.num_preemptions:
                    self.preemptions[name_of(engine_id)] = request.num_preemptions
            return output

        with mock.patch.object(self._scheduler, "schedule", note):
            yield

    def of(self, request_id: str) -> list[int]:
        """Tokens that were scheduled of one request, in the steps in which some were."""
        return [step[request_id] for step in self.scheduled if request_id in step]
