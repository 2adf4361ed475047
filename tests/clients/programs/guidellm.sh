# guidellm: synthetic prompts, one at a time, and what it measured.
set -euo pipefail

guidellm run --backend "kind=openai_http,target=${OPENAI_BASE_URL%/v1},model=omnirelay" --tokenizer "kind=hf_auto,model=$CHECKPOINT" \
    --profile kind=synchronous --constraint kind=max_requests,count=4 \
    --data "kind=synthetic_text,prompt_tokens=24,output_tokens=8" --output kind=json,path=guidellm.json
