#!/bin/sh
# Bring a real pooler for the tests where that harms nobody: as root, with apt, and where no systemd would start the
# service that the package comes with. Never fails: without PgBouncer the tests that need it are skipped, and say so.
PATH="$PATH:/usr/sbin"
command -v pgbouncer >/dev/null && exit 0
if [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() {
    timeout 60 apt-get install -y --no-install-recommends pgbouncer >/dev/null 2>&1
}
install || { timeout 60 apt-get update >/dev/null 2>&1 && install; } || echo "pgbouncer cannot be installed here"
exit 0
