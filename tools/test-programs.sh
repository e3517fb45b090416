#!/bin/sh
# Install the programs that some tests need: a connection pooler, a browser, curl and jq, libfaketime, libraries of Qt.
# Only what is missing, named before it is installed; as root, with apt, and not where systemd would start the services
# of packages. Never fails: tests whose program is missing are skipped, and say so.
PATH="$PATH:/usr/sbin"
missing=""
for program in pgbouncer curl jq chromium; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
for library in libEGL.so.1:libegl1 libGL.so.1:libgl1 libxkbcommon.so.0:libxkbcommon0 libfontconfig.so.1:libfontconfig1 libdbus-1.so.3:libdbus-1-3; do
    ldconfig -p | grep -q "${library%%:*}" || missing="$missing ${library#*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || [ -d /run/systemd/system ] || ! command -v apt-get >/dev/null; then
    echo "Some tests will be skipped. To run them: apt-get install$missing"
    exit 0
fi
echo "Installing for the tests: apt-get install --no-install-recommends$missing"
export DEBIAN_FRONTEND=noninteractive
timeout 60 apt-get update >/dev/null 2>&1
for package in $missing; do
    timeout 120 apt-get install -y --no-install-recommends "$package" >/dev/null 2>&1 || echo "$package cannot be installed here"
done
exit 0
