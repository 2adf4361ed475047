#!/usr/bin/env bash
# Creates the virtual environment; it can be run again at any time.
#
#   scripts/setup_env.sh [--device cpu|gpu] [--venv FOLDER] [--runtime]
#
# Needs Python 3.11 (or what PYTHON names, up to 3.13) with venv, and a package index: pip's settings hold for uv, too.
# --runtime installs only what the stages need, as for their image.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cpu venv=.venv tools=(-r requirements/dev.lock)
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift ;;
        --venv) case $2 in /*) venv=$2 ;; *) venv=$here/$2 ;; esac; shift ;;
        --runtime) tools=() ;;
        *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' scripts/setup_env.sh; exit 2 ;;
    esac
    shift
done
began=$SECONDS
python=${PYTHON:-python3.11}
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "[$1/5] $2"; }
fail() { echo "The environment is not ready: $1" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    fail "the packages are locked for Python 3.11 to 3.13: install one, or name it: make PYTHON=/path/to/python3.11 ..."

say 1 "the environment in $(basename "$venv")/"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv" ||
    fail "'$python -m venv' failed; on Debian and Ubuntu the package python3-venv of its version has to be installed"
pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet "$@"; }

if [ "$device" = gpu ]; then
    say 2 "PyTorch: vLLM brings the CUDA build it was made for"
    say 3 "vLLM and the other pinned packages (several GB)"
    scripts/uv.sh pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r requirements/gpu.lock "${tools[@]}"
else
    say 2 "$(grep -v '^#' requirements/torch.lock | tr '\n' ' '), CPU builds"
    ask="import urllib.request as u; u.urlopen(u.Request('$torch_index/torch/', method='HEAD'), timeout=5)"
    index=()
    # Around it all, because a timeout of its own does not bound the DNS lookup.
    if timeout 6 "$python" -c "$ask" >/dev/null 2>&1; then
        index=(--index-url "$torch_index")
    else
        echo "      $torch_index does not answer; taking what pip finds"
    fi
    # By pip, which alone finds a build that lies in a folder.
    pip_install --no-deps "${index[@]}" -r requirements/torch.lock
    # Read, not imported: torch's own requirements come in the next step.
    grep -q '^cuda.*= None' "$venv"/lib/python3.1?/site-packages/torch/version.py ||
        fail "pip found only a CUDA build of PyTorch.  Let it reach $torch_index
or another source of a CPU build, remove $venv, and try again."
    say 3 "$(cat requirements/cpu.lock $([ ${#tools[@]} = 0 ] || echo requirements/dev.lock) | grep -c ==) locked packages"
    scripts/uv.sh pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r requirements/cpu.lock "${tools[@]}"
fi
if [ ${#tools[@]} -gt 0 ]; then
    say 4 "OmniRelay itself"
    pip_install --no-deps --no-build-isolation -e deploy/client -e .
else
    say 4 "OmniRelay itself: left out"
fi
say 5 "loading vLLM once"
"$venv/bin/python" -c "import torch, transformers, vllm" >/dev/null
echo "The environment is ready ($((SECONDS - began)) s)."
