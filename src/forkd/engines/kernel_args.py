"""What every guest's kernel is told, whichever engine runs it."""

from __future__ import annotations

_PLAIN = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic no_timer_check tsc=reliable random.trust_cpu=on"
# What wakes an idle guest for its own sake: watchdogs (which also take a slow host for a hung one), statistics of
# every second, compaction of every half second, pressure accounting.
_IDLE = "nowatchdog psi=0 sysctl.vm.stat_interval=600 sysctl.vm.compaction_proactiveness=0"
# Ten seconds after the last module was loaded the kernel looks for late drivers, once. A parent is frozen before that,
# and each of its forks would do it (measured: 10 ms and 2.7 MiB).
_ONCE = "deferred_probe_timeout=0"

KERNEL_ARGS = f"{_PLAIN} {_IDLE} {_ONCE}"
