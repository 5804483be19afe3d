"""Table of ways to train a model on a card, printed without a browser: `python -m workbench fit CONFIG`."""

from __future__ import annotations

import argparse
import sys

from workbench.fit import ALIASES, PRECISIONS, PRESETS, WAYS, card_table, make_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    names = ", ".join([*ALIASES, *PRESETS])
    parser.add_argument("model", nargs="?", help=f"a folder with config.json, the file itself, or one of: {names}")
    parser.add_argument(
        "--card",
        default="RTX 4090 24GB",
        help='a card of the table, or "emulated 2GB" for memory of this machine (default: %(default)s)',
    )
    parser.add_argument("--host", help='memory of the host, as "128GB" (default: that of this machine)')
    parser.add_argument("--disk", help='free space on a disk, as "2TB", or a folder, whose disk is measured')
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of compute (default: %(default)s)")
    parser.add_argument("--code", choices=WAYS, help="print the program that starts this way, in place of the table")
    parser.add_argument("--cards", action="store_true", help="print the table of cards with its sources, and end")


def main(args: argparse.Namespace) -> int:
    """Print the table, a program or the cards; return the exit status."""
    if args.cards:
        print(card_table().to_text())
        return 0
    if args.model is None:
        print("give a model, as in: python -m workbench fit llama-7b --card 'RTX 4090'", file=sys.stderr)
        return 2
    try:
        request = make_request(
            args.model,
            card=args.card,
            host=args.host,
            disk=args.disk,
            rows=args.rows,
            length=args.length,
            precision=args.precision,
        )
        if request.is_measured:
            print("measuring steps on this machine", file=sys.stderr, flush=True)
        table = request.table()
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.code is None:
        print(table)
        return 0
    way = next(way for way in table.ways if way.name == args.code)
    print(way.reason if way.reason else request.code(way))
    return 1 if way.reason else 0
