"""Compiles the JSON schemas of requests, beside the step loop."""

import hashlib
import json
import logging
import sys
from typing import Final

import xgrammar
from cachetools import LRUCache
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar, has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.request import StructuredOutputRequest

from omnirelay.errors import BusyError, InvalidRequestError, MessageError, StageFailedError
from services.thinker.background import Background
from services.thinker.grammar_worker import ANSWERS, CompileJob, CompileLimits, Rejected
from services.thinker.media.decoder import RETRY_MS, DecoderProcess
from shared.messages import ThinkRequest

WORKER: Final = (sys.executable, "-m", "services.thinker.grammar_worker")
COMPILE_S: Final = 10.0
"""Longest time for one schema."""
MEMORY_BYTES: Final = 2**30
"""Most memory for one schema."""
CACHE_BYTES: Final = 128 * 2**20
log = logging.getLogger(__name__)

Result = xgrammar.CompiledGrammar | str
"""A grammar, or why a schema has none."""


class Grammars(Background[None]):
    """The grammars of requests, compiled one at a time by a child process, and kept by schema and salt.

    The child is started with the first schema.
    """

    problem = "the JSON schema cannot be compiled: unexpected error"
    failure = InvalidRequestError

    def __init__(self, engine: LLMEngine, end_tokens: list[int], wake_fd: int) -> None:
        super().__init__("grammars", 1, wake_fd)
        core = engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._tokenizer = core.structured_output_manager.tokenizer
        self._vocabulary = engine.model_config.get_vocab_size()
        # vLLM makes it with a grammar that it has compiled itself.
        core.structured_output_manager._grammar_bitmask = xgrammar.allocate_token_bitmask(
            engine.vllm_config.scheduler_config.max_num_seqs, self._vocabulary
        )
        self._end_tokens = end_tokens
        self._cache: LRUCache[str, Result] = LRUCache(CACHE_BYTES, getsizeof=_size)
        self._info: xgrammar.TokenizerInfo
        self._child: DecoderProcess | None = None
        self._ready: dict[str, xgrammar.CompiledGrammar] = {}

    def release(self, request_id: str) -> None:
        """Let go of a request, and of its grammar."""
        super().release(request_id)
        self._ready.pop(request_id, None)

    def begin(self, request_id: str, drawn: list[int]) -> XgrammarGrammar:
        """The grammar of a request, behind the tokens of earlier attempts; StageFailedError at others'."""
        compiled = self._ready.pop(request_id)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._end_tokens)
        grammar = XgrammarGrammar(vocab_size=self._vocabulary, matcher=matcher, ctx=compiled)
        if not grammar.accept_tokens(request_id, drawn):
            raise StageFailedError("resume.text_token_ids: the JSON schema does not allow them")
        return grammar

    def attach(self, engine_id: str, grammar: XgrammarGrammar) -> None:
        """Let a request follow a grammar, right after it was added."""
        request = self._scheduler.requests[engine_id]
        request.structured_output_request = StructuredOutputRequest(
            StructuredOutputsParams(json_object=True), grammar
        )

    def close(self) -> None:
        """End the child; nothing is taken any more."""
        super().close()
        if self._child is not None:
            self._child.end()

    def interrupt(self) -> None:
        """End what is compiled."""
        if (child := self._child) is not None:
            child.kill()

    def work(self, request: ThinkRequest) -> None:
        """Compile a request's schema; InvalidRequestError if that cannot be."""
        schema = request.sampling.json_schema or ""
        digest = hashlib.sha256(f"{request.cache_salt or ''} {schema}".encode()).hexdigest()
        result = self._cache.get(digest)
        if result is None:
            result = self._compile(schema)
            if _size(result) <= self._cache.maxsize:
                self._cache[digest] = result
        if isinstance(result, str):
            raise InvalidRequestError(f"the JSON schema cannot be compiled: {result}")
        self._ready[request.request_id] = result

    def _compile(self, schema: str) -> Result:
        try:
            root = json.loads(schema)
            if isinstance(root, dict) and has_xgrammar_unsupported_json_features(root):
                return "it has features that are not supported"
        except (ValueError, RecursionError):
            return "it is not JSON"
        child = self._start_child()
        used = child.ready
        try:
            if not used:
                self._make_ready(child)
            child.pipe.set_deadline(COMPILE_S)
            data = schema.encode()
            child.pipe.send(CompileJob(len(data)), data)
            answer = child.pipe.receive(ANSWERS)
            if isinstance(answer, Rejected):
                return answer.message
            grammar = child.pipe.receive_bytes(answer.size)
            return xgrammar.CompiledGrammar.deserialize_json(grammar.decode(), self._info)
        except TimeoutError:
            self._lose(child)
            return f"it takes longer than {COMPILE_S:g} s: simplify it"
        except (EOFError, OSError, MessageError):
            self._lose(child)
            # One that was used may have ended before, of an earlier schema or for want of memory.
            return self._compile(schema) if used else "its compiler ended: simplify it"

    def _start_child(self) -> DecoderProcess:
        with self._lock:
            if self._closed:
                raise StageFailedError("the stage ends")
            try:
                self._child = self._child or DecoderProcess(WORKER)
            except OSError as error:
                raise BusyError(f"no compiler of schemas: {error.strerror}; try again", RETRY_MS) from error
            return self._child

    def _make_ready(self, child: DecoderProcess) -> None:
        self._info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocabulary)
        vocabulary = self._info.serialize_json().encode()
        limits = CompileLimits(len(vocabulary), MEMORY_BYTES, COMPILE_S)
        try:
            child.wait_until_ready(limits, vocabulary)
        except (EOFError, OSError, MessageError) as error:
            self._lose(child)
            raise BusyError(f"the compiler of JSON schemas: {error}; try again", RETRY_MS) from error

    def _lose(self, child: DecoderProcess) -> None:
        child.kill()
        child.end()
        self._child = None
        log.warning("the schema compiler %d %s; the next schema gets a new one", child.pid, child.ending)


def _size(result: Result) -> int:
    return len(result) if isinstance(result, str) else int(result.memory_size_bytes)
