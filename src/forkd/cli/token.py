"""`forkd token`: who may use the daemon over TCP."""

from __future__ import annotations

import argparse

from forkd.cli.arguments import add_json
from forkd.cli.commands import Actions
from forkd.cli.output import note, print_lines, render_time, show
from forkd.daemon.tokens import TokenStore
from forkd.host.paths import find_home


def add_token(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser)
    create = actions.add("create", run_create, "make a token and show it once")
    create.add_argument("name", help="who or what it is for; the audit log shows it")
    actions.add("ls", run_ls, "list the tokens by name")
    revoke = actions.add("revoke", run_revoke, "revoke a token, at once")
    revoke.add_argument("name")
    for action in actions.parsers():
        add_json(action)


def run_create(args: argparse.Namespace) -> int:
    value = _store().create(args.name)
    show(args, {"name": args.name, "token": value}, lambda _: print(value))
    if not args.json:
        note("Keep it: it is shown only this once. Clients take it from FORKD_TOKEN.")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    tokens = _store().list()
    rows = [{"name": token.name, "created_at_unix": token.created_at_unix} for token in tokens]
    lines = [f"{token.name:24} {render_time(token.created_at_unix)}" for token in tokens]
    if not tokens and not args.json:
        note("There are no tokens; make one with: forkd token create NAME")
    return show(args, rows, lambda _: print_lines(lines))


def run_revoke(args: argparse.Namespace) -> int:
    left = _store().revoke(args.name)
    if left == 0 and not args.json:
        note("No token is left: the daemon lets nobody in over TCP. The unix socket needs no token.")
        note("hint: To let clients in again, at once: forkd token create NAME")
        note(f"hint: To need no token on 127.0.0.1 any more, remove {find_home().tokens}")
    return show(args, {"name": args.name, "revoked": True, "left": left})


def _store() -> TokenStore:
    return TokenStore(find_home().tokens)
