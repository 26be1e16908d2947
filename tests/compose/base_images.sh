#!/usr/bin/env bash
# Makes the images that the stack builds on, for machines that reach Debian's packages and no image registry:
#
#   tests/compose/base_images.sh && make image BASE=outrider-base EXTRAS=cpu
#
# outrider-base holds Python, outrider-redis Debian's Redis (the same as redis:7 for what the stack asks of it).
# Needs root, debootstrap and a Docker engine. An image that is there already stays as it is.
set -euo pipefail

suite=${SUITE:-bookworm}
mirror=${MIRROR:-}

make_image() { # name, packages, and what `docker import` is to change
    local name=$1 packages=$2
    shift 2
    if docker image inspect "$name" > /dev/null 2>&1; then
        echo "$name is there"
        return
    fi
    local root
    root=$(mktemp -d)
    trap 'rm -rf "$root"' RETURN
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" $mirror
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
    # As this machine does, for builds that go out by a proxy of its own.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    mkdir -p "$root/data" && chown 999:999 "$root/data"
    tar -C "$root" -c . | docker import "$@" - "$name"
}

make_image outrider-base ca-certificates,python3,python3-venv \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
make_image outrider-redis redis-server,redis-tools,ca-certificates \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'WORKDIR /data' --change 'VOLUME /data'
