"""`forkd trust`: whose packs are taken in, and the key that packs of this home are signed with."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from forkd.cli.arguments import add_json
from forkd.cli.commands import Actions
from forkd.cli.output import note, print_lines, print_rows, render_time, show
from forkd.host.paths import find_home
from forkd.store.keys import ANYWHERE, SigningKey, TrustList


def add_trust(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser)
    actions.add("ls", run_ls, "list the keys that are trusted")
    add = actions.add("add", run_add, "trust a key")
    add.add_argument("key", metavar="KEY", help="as forkd trust key shows it on the other machine")
    add.add_argument("--origin", default=ANYWHERE, metavar="URL", help="only for packs from there (default: any)")
    add.add_argument("--name", default="", help="whose it is, for you")
    remove = actions.add("rm", run_rm, "trust a key no more")
    remove.add_argument("key", metavar="KEY", help="the key, its origin or its name")
    actions.add("key", run_key, "show the key of this home, which is made when there is none")
    for action in actions.parsers():
        add_json(action)


def run_ls(args: argparse.Namespace) -> int:
    keys = _list().list()
    if not keys and not args.json:
        note("No keys of others are trusted; packs of this home are.")
    rows = [(each.key, each.origin, each.name or "-", render_time(each.added_at_unix)) for each in keys]
    return show(
        args,
        [asdict(each) for each in keys],
        lambda _: print_rows(("KEY", "ORIGIN", "NAME", "ADDED"), rows) if rows else None,
    )


def run_add(args: argparse.Namespace) -> int:
    return show(args, asdict(_list().add(args.key, args.origin, args.name)))


def run_rm(args: argparse.Namespace) -> int:
    gone = _list().remove(args.key)
    return show(args, {"removed": [asdict(each) for each in gone]}, lambda _: print_lines(each.key for each in gone))


def run_key(args: argparse.Namespace) -> int:
    key = SigningKey(find_home().signing_key).public()
    return show(args, {"key": key}, lambda _: print(key))


def _list() -> TrustList:
    home = find_home()
    return TrustList(home.trust, SigningKey(home.signing_key))
