"""An answer that is JSON of a schema: the values of a calculation."""

import argparse
import json

from omnirelay import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "operation": {"enum": ["plus", "minus", "times"]},
        "result": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["operation", "result"],
    "additionalProperties": False,
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is twenty plus sixteen?")
parser.add_argument("--address", default="tcp://127.0.0.1:5555")
parser.add_argument("--max-tokens", type=int, default=256)
arguments = parser.parse_args()

with Client(arguments.address) as client:
    result = client.chat(
        arguments.question, speech=False, json_schema=SCHEMA, max_tokens=arguments.max_tokens
    ).result()
if result.done.finish_reason == "length":
    raise SystemExit(f"not complete after {arguments.max_tokens} tokens: {result.text}")
print(json.loads(result.text))
