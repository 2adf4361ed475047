#!/usr/bin/env bash
# Writes the lock files in requirements/.
#
#   scripts/lock.sh [NAME...]
#
# NAME: cpu, dev, cluster, quality, audit, site, turns: hashes of the versions that are pinned there by hand; gateway (and webrtc
# with it): what these need in the versions of cpu and dev; gpu: what gpu.txt needs, in those of cpu but for what vLLM's
# CUDA build wants older; clients/PROGRAM: the newest versions of PROGRAM.in and what
# it needs, without what PROGRAM.without or without.txt leave out.  All but the clients without a NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile() {
    scripts/uv.sh pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 "$@"
}

write() { # a lock from what is read, below the comment that it has
    local lock=requirements/$1.lock head body
    head=$(grep '^#' "$lock" || echo "# $1.in and all that it needs, pinned by scripts/lock.sh.")
    body=$(cat)
    printf '%s\n%s\n' "$head" "$body" >"$lock"
    echo "$lock is written"
}

pins() { grep -hv '^ *#\|^ ' "${@/%/.lock}" | sed 's/ *\\$//'; }

gateway() {
    local needs=(pyproject.toml -)
    compile "$@" --python-platform x86_64-manylinux_2_31 --constraint <(cd requirements && pins cpu dev) --no-emit-package omnirelay "${needs[@]}" \
        <<<"omnirelay @ file://$PWD/deploy/client"
}

for name in "${@:-cpu dev cluster quality audit site turns gateway gpu}"; do
    for each in $name; do
        case $each in
            gateway)
                gateway | write gateway
                mapfile -t there < <(cd requirements && pins gateway | sed 's/==.*//; s/^/--no-emit-package=/')
                gateway --extra webrtc "${there[@]}" | write webrtc
                ;;
            gpu)
                for machine in aarch64 x86_64; do
                    compile --only-binary :all: --python-platform "$machine-manylinux_2_34" requirements/gpu.txt \
                        --constraint <(cd requirements && pins cpu | grep -v '^apache-tvm-ffi==') | write gpu
                    # Both need the same; who finds otherwise has to write two files.
                    [ "$machine" != aarch64 ] || cp requirements/gpu.lock "${other:=$(mktemp)}"
                done
                cmp "$other" requirements/gpu.lock && rm "$other"
                ;;
            clients/*)
                without=(--overrides requirements/clients/without.txt)
                [ ! -f "requirements/$each.without" ] || without+=(--overrides "requirements/$each.without")
                [ "$each" != clients/vllm-omni ] || without+=(--no-deps)
                compile --python-platform x86_64-manylinux_2_31 "${without[@]}" "requirements/$each.in" | write "$each"
                ;;
            *) (cd requirements && pins "$each") | compile --universal --no-deps - | write "$each" ;;
        esac
    done
done
