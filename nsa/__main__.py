"""`python -m nsa`: what this machine is, which settings are in force, what to do next; `python -m nsa calibrate`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from nsa.doctor import report


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa", description="What nsa would do on this machine, and why.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="GPU, versions, settings, threshold (what `python -m nsa` alone does)")
    commands.add_parser("calibrate", help="measure what routing rests on here, for your user alone (a minute or two)")
    command = parser.parse_args(argv).command
    logging.basicConfig(format="%(message)s")
    if command == "calibrate":
        from nsa.tuning.calibrate import main as calibrate

        return calibrate()
    try:
        print("\n".join(report()), flush=True)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:  # a setting that cannot be parsed: it names file or variable
        print(f"nsa: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
