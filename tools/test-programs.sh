#!/bin/sh
# Bring real programs for the tests where that harms nobody: a pooler, a browser, what a worker in bash needs, clocks that are wrong, libraries of Qt. As root, with
# apt, and where no systemd would start the services that packages come with. Never fails: without a program the tests
# that need it are skipped, and say so.
PATH="$PATH:/usr/sbin"
if [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
updated=""
update() {
    if [ -z "$updated" ]; then
        updated=yes
        timeout 60 apt-get update >/dev/null 2>&1
    fi
}
for program in pgbouncer curl jq chromium; do
    command -v "$program" >/dev/null && continue
    update
    timeout 120 apt-get install -y --no-install-recommends "$program" >/dev/null 2>&1 || echo "$program cannot be installed here"
done
if ! ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1; then
    update
    timeout 120 apt-get install -y --no-install-recommends libfaketime >/dev/null 2>&1 || echo "libfaketime cannot be installed here"
fi
for library in libEGL.so.1:libegl1 libGL.so.1:libgl1 libxkbcommon.so.0:libxkbcommon0 libfontconfig.so.1:libfontconfig1 libdbus-1.so.3:libdbus-1-3; do
    ldconfig -p | grep -q "${library%%:*}" && continue
    update
    timeout 120 apt-get install -y --no-install-recommends "${library#*:}" >/dev/null 2>&1 || echo "${library#*:} cannot be installed here"
done
exit 0
