#!/usr/bin/env bash
# Lists the client programs whose locks in requirements/clients/ are behind the package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for wanted in requirements/clients/*.in; do
    name=$(basename "$wanted" .in)
    newest=$(scripts/uv.sh pip compile --quiet --no-deps --no-header --no-annotate --python-version 3.11 "$wanted")
    while read -r package; do
        grep -q "^$package\b" "requirements/clients/$name.lock" ||
            echo "$name: $(grep -o "^${package%%==*}==[^ ]*" "requirements/clients/$name.lock" || echo nothing) locked, $package is there"
    done <<<"$newest"
done
