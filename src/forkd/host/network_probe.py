"""Whether this host can give sandboxes a network, and by which uplink. It is tried, and nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from forkd.errors import HostLacks
from forkd.host import nftables
from forkd.host.finding import Finding, Status
from forkd.host.tap import TUN, open_tap
from forkd.host.tools import find_program

Kind = Literal["veth", "pasta"]
Expressions = list[dict[str, Any]]  # of a rule
# Of the links and tables of all daemons of forkd on this host, in the daemons' own network.
PREFIX = "fkd"
# There while forkd has turned forwarding on.
FORWARDING_TABLE = "forkd_forwarding"
_LEGACY = Path("/proc/net/ip_tables_names")
_TRIAL_DEADLINE_S = 10.0
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
# What rules of sandboxes are made of.
_TRIAL = """table inet trial {
 set names { type ipv4_addr . inet_service; flags interval, timeout; }
 quota most { over 1 bytes }
 chain forward {
  type filter hook forward priority 0; policy drop;
  ct state established ct count over 9 log group 1 reject with tcp reset
  ip daddr . tcp dport @names quota name "most" drop
 }
 chain arriving { type nat hook prerouting priority -100; tcp dport 443 redirect to :8443; }
 chain leaving { type nat hook postrouting priority 100; masquerade; }
}"""


def probe_network() -> Finding:
    """Raises HostLacks with what is missing."""
    kind = check_network("auto")
    _try()
    if kind == "veth":
        return Finding("network", Status.OK, "sandboxes can have one, by a link and rules of our own (veth)")
    why = find_firewall() if os.geteuid() == 0 else None
    found = "sandboxes can have one, by pasta" + (f": {why}" if why else "")
    return Finding("network", Status.OK, found)


def check_network(wanted: Literal["auto", "veth", "pasta"], tun: Path = TUN) -> Kind:
    """The uplink to use, after a quick look. Raises HostLacks with what is missing."""
    nftables.load_library()
    if not tun.exists():
        raise HostLacks(f"There is no {tun}", hint="Load the module: modprobe tun")
    if os.geteuid() != 0 and not os.access(tun, os.R_OK | os.W_OK):
        raise HostLacks(f"{tun} is not open to this user", hint=f"chmod 666 {tun}, as most distributions have it")
    return find_kind(wanted)


def choose_kind(wanted: Literal["auto", "veth", "pasta"], *, root: bool, in_the_way: str | None, pasta: bool) -> Kind:
    """Pure. `in_the_way`: a firewall that drops what we would forward. Raises HostLacks."""
    if wanted == "veth" and not root:
        raise HostLacks("An uplink by veth needs root", hint="Set the uplink to auto or pasta")
    if wanted == "veth" and in_the_way is not None:
        raise HostLacks(
            f"The firewall of this host drops forwarded packets: {in_the_way}",
            hint="Let it accept what comes from and goes to interfaces fkd*, or set the uplink to pasta",
        )
    if wanted != "pasta" and root and in_the_way is None:
        return "veth"
    if pasta:
        return "pasta"
    if wanted == "auto" and in_the_way is not None:
        raise HostLacks(
            f"The firewall of this host drops forwarded packets ({in_the_way}), and pasta is not installed",
            hint="Install it: apt install passt",
        )
    raise HostLacks("pasta is not a program on this host", hint="Install it: apt install passt")


def find_kind(wanted: Literal["auto", "veth", "pasta"]) -> Kind:
    root = os.geteuid() == 0
    in_the_way = find_firewall() if root and wanted != "pasta" else None
    return choose_kind(wanted, root=root, in_the_way=in_the_way, pasta=find_program("pasta") is not None)


def find_firewall() -> str | None:
    """What drops forwarded packets in this network and is not ours, in words."""
    for chain in _chains():
        if chain.get("hook") == "forward" and not _is_ours(chain["table"]):
            where = f"{chain['family']} {chain['table']}"
            listed = nftables.run_json(f"list chain {where} {chain['name']}")
            why = find_drop(chain.get("policy"), [each["rule"]["expr"] for each in listed if "rule" in each])
            if why is not None:
                return f"chain {chain['name']} of table {where} {why}"
    with contextlib.suppress(OSError):
        if "filter" in _LEGACY.read_text().split():
            return "it has rules of the old iptables, which cannot be judged"
    return None


def find_drop(policy: str | None, rules: Sequence[Expressions]) -> str | None:
    """Whether a chain drops what no rule of it names, in words. Pure. `rules`: as nftables prints them."""
    if _accepts(rules, "iifname") and _accepts(rules, "oifname"):
        return None
    if policy == "drop":
        return "has the policy drop"
    verdict = {key for each in rules[-1] for key in each} - {"counter", "log"} if rules else set()
    if verdict in ({"drop"}, {"reject"}):
        return f"ends with a rule that says {verdict.pop()} to all"
    return None


def _accepts(rules: Sequence[Expressions], interface: str) -> bool:
    """Whether all of ours passes, in this direction."""
    ours = {"op": "==", "left": {"meta": {"key": interface}}, "right": f"{PREFIX}*"}
    bare = ([part for part in rule if "counter" not in part] for rule in rules)
    return [{"match": ours}, {"accept": None}] in list(bare)


def _chains() -> list[dict[str, Any]]:
    return [each["chain"] for each in nftables.run_json("list chains") if "chain" in each]


def _is_ours(table: str) -> bool:
    return table.startswith(PREFIX) or table == FORWARDING_TABLE


def _try() -> None:
    """In a process of its own: a user namespace, a network in it, a tap and rules there. All of it ends with it."""
    argv = [sys.executable, "-I", "-m", __name__]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_TRIAL_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HostLacks(f"A trial of networks took more than {_TRIAL_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        message, _, hint = done.stderr.decode(errors="replace").strip().partition("\n")
        raise HostLacks(f"Networks of sandboxes cannot be made: {message}", hint=hint or None)


def _trial() -> None:
    """The process. What fails is written to its standard error, the hint on a line of its own."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        sys.exit(f"no user namespace ({reason})\nSet kernel.unprivileged_userns_clone and user.max_user_namespaces")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        sys.exit(f"no user in a user namespace ({error.strerror})\nAllow unprivileged user namespaces, in AppArmor too")
    try:
        open_tap("trial0")
    except OSError as error:
        sys.exit(f"no tap ({error.strerror})\nLoad the module: modprobe tun")
    try:
        nftables.run(_TRIAL)
    except OSError as error:
        first = str(error).splitlines()[0]
        sys.exit(f"no rules of nftables ({first})\nUse a kernel with nf_tables and its modules")


if __name__ == "__main__":
    _trial()
