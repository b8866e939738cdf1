"""The first program of a guest: a shell script that assembles the root and hands over to the agent.

Whatever fails is said on the console in one line with `forkd-init:`, and the machine is reset at once: the host
runs it with "no reboot", so it sees a dead guest and not a silent one.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

AGENT_SOURCE = "/forkd-agent"
AGENT_HOME = "/run/forkd/lib"
_DEVICE_WAIT_TENTHS = 100

_ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LANG=C.UTF-8",
)

START = f"""\
import sys
sys.path.insert(0, "{AGENT_HOME}")
from forkd.agent.main import main
main()
"""

_INIT = """\
#!/bin/sh
# Made by forkd. Commands are busybox's.
export PATH=/bin

fail() {
    # Through the kernel's log: that is on the console before the reset, a terminal's buffer may not be.
    echo "<0>forkd-init: $*" > /dev/kmsg || echo "forkd-init: $*" > /dev/console
    reboot -f
    sleep 5
    exit 1
}

try() {
    what=$1
    shift
    said=$("$@" 2>&1) || fail "$what failed: $said"
}

mount_point() {
    # A link here would lead out of the new root.
    if [ -L "$1" ] || [ ! -d "$1" ]; then
        rm -f "$1"
        try "making $1" mkdir -p "$1"
    fi
}

try "mounting /dev" mount -t devtmpfs -o mode=0755,nosuid devtmpfs /dev
try "mounting /proc" mount -t proc -o nosuid,nodev,noexec proc /proc
try "mounting /sys" mount -t sysfs -o nosuid,nodev,noexec sysfs /sys

for module in @MODULES@; do
    try "loading the module $module" insmod "/modules/$module.ko"
done

tenths=0
while [ ! -b /dev/vda ]; do
    [ "$tenths" -lt @WAIT@ ] || fail "no disk appeared as /dev/vda"
    tenths=$((tenths + 1))
    sleep 0.1
done

try "mounting the image /dev/vda" mount -t erofs -o ro /dev/vda /lower
try "mounting memory for changes" mount -t tmpfs -o mode=0755,size=75% tmpfs /upper
try "making the overlay's directories" mkdir /upper/changes /upper/work
try "mounting the overlay" mount -t overlay \\
    -o lowerdir=/lower,upperdir=/upper/changes,workdir=/upper/work overlay /newroot

for name in dev proc sys run tmp; do
    mount_point "/newroot/$name"
done
try "mounting /run" mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs /newroot/run
try "mounting /tmp" mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /newroot/tmp
try "copying the agent" mkdir -p /newroot@HOME@
try "copying the agent" cp -r @SOURCE@/. /newroot@HOME@/
[ -x "/newroot"@PYTHON@ ] || [ -L "/newroot"@PYTHON@ ] || fail "the image has no "@PYTHON@

try "preparing /dev" mkdir -p /dev/pts /dev/shm
try "mounting /dev/pts" mount -t devpts -o mode=0620,gid=5,ptmxmode=0666 devpts /dev/pts
try "mounting /dev/shm" mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
for name in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
    [ -e "/dev/${name%%:*}" ] || ln -s "${name#*:}" "/dev/${name%%:*}"
done
try "bringing up the loopback" ifconfig lo 127.0.0.1 netmask 255.0.0.0 up
for name in dev sys proc; do
    try "moving /$name" mount --move "/$name" "/newroot/$name"
done

exec busybox env -i @ENVIRONMENT@ /bin/busybox switch_root /newroot @PYTHON@ -I -B -u @HOME@/start.py
"""


def render_init(modules: Sequence[str], python: str) -> str:
    words = {
        "@MODULES@": " ".join(map(shlex.quote, modules)) or "''",
        "@WAIT@": str(_DEVICE_WAIT_TENTHS),
        "@SOURCE@": AGENT_SOURCE,
        "@HOME@": AGENT_HOME,
        "@PYTHON@": shlex.quote(python),
        "@ENVIRONMENT@": " ".join(map(shlex.quote, _ENVIRONMENT)),
    }
    script = _INIT
    for word, value in words.items():
        script = script.replace(word, value)
    return script
