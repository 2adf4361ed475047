#!/usr/bin/env bash
# uv, which is installed in .cache/uv, with pip's settings: its variables and its files.
#
#   scripts/uv.sh ARGUMENT...
set -euo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3.11}
uv=$home/.cache/uv/bin/uv
if ! [ "$uv" -nt "$home/requirements/uv.lock" ]; then
    "$python" -m venv --clear "$home/.cache/uv"
    "$home/.cache/uv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --require-hashes \
        -r "$home/requirements/uv.lock"
    touch "$uv"
fi

setting() {
    local variable="PIP_${1//-/_}"
    variable=${variable^^}
    echo "${!variable:-$("$python" -m pip config get "global.$1" 2>/dev/null || true)}"
}

index=$(setting index-url) trusted=$(setting trusted-host)
# Folders hold other wheels than those that are locked here.
extra=$(setting extra-index-url | tr ' ' '\n' | grep -v '^file:' || true)
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
[ -z "$extra" ] || export UV_INDEX="$extra"
[ -z "$trusted" ] || export UV_INSECURE_HOST="$trusted"
export UV_SYSTEM_CERTS=1 UV_COMPILE_BYTECODE=1 UV_INDEX_STRATEGY=unsafe-best-match
exec "$uv" "$@"
