#!/usr/bin/env bash
# Installs the wheels in dist/ into empty environments, as a user does, and runs what they bring: the client with what
# pip finds for it, and the server without its extras, with the locked versions.  `make wheels` calls it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3.11}
wheels=("$PWD"/dist/omnirelay-[0-9]*.whl "$PWD"/dist/omnirelay_server-*.whl)
scratch=$(mktemp -d)
gateway=
clean_up() {
    # It may have ended by itself, which the script has told.
    if [ -n "$gateway" ] && kill "$gateway" 2>/dev/null; then wait "$gateway" || true; fi
    rm -rf "$scratch"
}
trap clean_up EXIT
fail() { echo "The wheels do not work: $1" >&2; exit 1; }

for name in client server; do "$python" -m venv "$scratch/$name"; done
"$scratch/client/bin/python" -m pip install --quiet --no-input "${wheels[0]}"
PYTHON="$python" scripts/uv.sh pip install --quiet --python "$scratch/server/bin/python" --no-deps --require-hashes \
    -r requirements/gateway.lock
"$scratch/server/bin/python" -m pip install --quiet --no-input --no-deps --no-index "${wheels[@]}"
# Not from the sources: the environments alone say what can be imported.
cd "$scratch"
for name in client server; do "$name/bin/python" -m pip check >/dev/null || fail "pip check of the $name"; done
[ "$(client/bin/omnirelay --version)" = "$(server/bin/omnirelay --version)" ] || fail "their versions differ"
if client/bin/omnirelay up --help >/dev/null 2>&1; then fail "the client has the server's commands"; fi
server/bin/omnirelay config init >config.yaml
export OMNIRELAY_GATEWAY__LISTEN OMNIRELAY_GATEWAY__HTTP OMNIRELAY_GATEWAY__MONITOR=null
read -r OMNIRELAY_GATEWAY__LISTEN OMNIRELAY_GATEWAY__HTTP < <("$python" -c 'import socket
places = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in places))')
OMNIRELAY_GATEWAY__EVENTS="ipc://$scratch/events" OMNIRELAY_GATEWAY__CONTROL="ipc://$scratch/control" \
    OMNI_MODEL=$(dirname "$(server/bin/python -c 'import shared; print(shared.__path__[0])')")/checkpoint/speaking \
    server/bin/python -m gateway --config config.yaml >gateway.log 2>&1 &
gateway=$!
# It has no stages, and says so; the client asks it by TCP, Python by HTTP.
until status=$(client/bin/omnirelay status --gateway "$OMNIRELAY_GATEWAY__LISTEN" 2>&1) ||
    [[ $status != *gateway_unreachable* ]]; do
    kill -0 "$gateway" || fail "$(cat gateway.log)"
    sleep 0.2
done
[[ $status = *thinker* ]] || fail "omnirelay status says: $status; the gateway: $(cat gateway.log)"
for path in / /docs /v1/models; do
    "$python" -c 'import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1])' \
        "${OMNIRELAY_GATEWAY__HTTP/tcp:/http:}$path" || fail "$path of the gateway"
done
echo "tried: $(basename -a "${wheels[@]}" | xargs)"
