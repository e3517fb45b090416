#!/bin/sh
# Bring real programs for the tests where that harms nobody: a pooler, a browser, what a worker in bash needs. As root, with
# apt, and where no systemd would start the services that packages come with. Never fails: without a program the tests
# that need it are skipped, and say so.
PATH="$PATH:/usr/sbin"
if [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
updated=""
for program in pgbouncer curl jq chromium; do
    command -v "$program" >/dev/null && continue
    if [ -z "$updated" ]; then
        updated=yes
        timeout 60 apt-get update >/dev/null 2>&1
    fi
    timeout 120 apt-get install -y --no-install-recommends "$program" >/dev/null 2>&1 || echo "$program cannot be installed here"
done
exit 0
