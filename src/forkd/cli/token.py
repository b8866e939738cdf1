"""`forkd token`: who may use the daemon over TCP."""

from __future__ import annotations

import argparse
import json
import sys
import time

from forkd.daemon.tokens import TokenStore
from forkd.host.paths import find_home


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("token", help="create, list and revoke tokens")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a token and show it, this once")
    create.add_argument("name", help="whose or what for; it is in the audit log")
    create.add_argument("--json", action="store_true", help="print one JSON object")
    create.set_defaults(func=run_create)
    listing = actions.add_parser("ls", help="list the tokens by name")
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    listing.set_defaults(func=run_ls)
    revoke = actions.add_parser("revoke", help="let a token be of no use, at once")
    revoke.add_argument("name")
    revoke.add_argument("--json", action="store_true", help="print one JSON object")
    revoke.set_defaults(func=run_revoke)


def run_create(args: argparse.Namespace) -> int:
    value = _store().create(args.name)
    if args.json:
        print(json.dumps({"name": args.name, "token": value}))
    else:
        print(value)
        print("Keep it: it is shown this once. Clients take it from FORKD_TOKEN.", file=sys.stderr)
    return 0


def run_ls(args: argparse.Namespace) -> int:
    tokens = _store().list()
    if args.json:
        print(json.dumps([{"name": token.name, "created_at_unix": token.created_at_unix} for token in tokens]))
        return 0
    if not tokens:
        print("No tokens. Make one with: forkd token create NAME", file=sys.stderr)
    for token in tokens:
        print(f"{token.name:24} {time.strftime('%Y-%m-%d %H:%M', time.localtime(token.created_at_unix))}")
    return 0


def run_revoke(args: argparse.Namespace) -> int:
    left = _store().revoke(args.name)
    if args.json:
        print(json.dumps({"name": args.name, "revoked": True, "left": left}))
    elif left == 0:
        print("No token is left: over TCP the daemon now answers nobody. The unix socket needs none.", file=sys.stderr)
    return 0


def _store() -> TokenStore:
    return TokenStore(find_home().tokens)
