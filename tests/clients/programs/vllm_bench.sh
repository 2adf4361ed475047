# vLLM's benchmark: random prompts to chats, and what it measured.
set -euo pipefail

vllm bench serve --backend openai-chat --base-url "${OPENAI_BASE_URL%/v1}" --endpoint /v1/chat/completions \
    --model "$CHECKPOINT" --served-model-name omnirelay \
    --dataset-name random --random-input-len 24 --random-output-len 8 --num-prompts 4 \
    --save-result --result-filename result.json
cat result.json
