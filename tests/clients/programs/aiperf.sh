# aiperf: synthetic prompts, two at a time, streamed.
set -euo pipefail

aiperf profile --url "${OPENAI_BASE_URL%/v1}" --model omnirelay --tokenizer "$CHECKPOINT" --endpoint-type chat \
    --streaming --isl 24 --osl 8 --request-count 6 --concurrency 2 --artifact-dir aiperf --ui none
