"""vLLM-Omni's ``vllm bench serve --omni``: its own benchmark, without the command around it.

The package as a whole needs another vLLM than the server's, so that only the benchmark is loaded from it.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

# Beside a CPU build of PyTorch it cannot be imported, and the benchmark does without.
sys.modules["torchvision"] = None  # type: ignore[assignment]
for name in ("vllm_omni", "vllm_omni.entrypoints", "vllm_omni.entrypoints.cli"):
    package = ModuleType(name)
    package.__path__ = [str(Path(sysconfig.get_path("purelib"), *name.split(".")))]
    sys.modules[name] = package

import vllm_omni.benchmarks.patch.patch  # noqa: E402, F401 - registers its backends
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm_omni.entrypoints.cli.benchmark.serve import OmniBenchmarkServingSubcommand  # noqa: E402

REQUESTS = 4
parser = FlexibleArgumentParser()
OmniBenchmarkServingSubcommand.add_cli_args(parser)
options = {
    "backend": "openai-chat-omni",
    "base-url": os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    "endpoint": "/v1/chat/completions",
    "model": "omnirelay",
    "tokenizer": os.environ["CHECKPOINT"],
    "dataset-name": "random",
    "random-input-len": 16,
    "random-output-len": 8,
    "num-prompts": REQUESTS,
    "max-concurrency": 2,
    "percentile-metrics": "ttft,tpot,itl,e2el,audio_ttfp,audio_rtf",
    "extra-body": json.dumps({"modalities": ["text", "audio"]}),
    "result-filename": "result.json",
}
words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
OmniBenchmarkServingSubcommand.cmd(parser.parse_args([*words, "--save-result", "--disable-tqdm"]))
print(json.dumps(json.loads(Path("result.json").read_text())))
