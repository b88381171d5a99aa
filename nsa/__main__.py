"""The command line: `python -m nsa` reports on this machine, `python -m nsa calibrate` measures its GPU,
`python -m nsa record-workload -- COMMAND` writes the shapes of a program's calls."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from nsa.doctor import report


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nsa", description="Which kernels nsa uses here, and why.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="report GPU, versions, settings and threshold (the default command)")
    commands.add_parser("calibrate", help="measure this GPU for routing, for your user only (a few minutes)")
    record = commands.add_parser("record-workload", help="write the shapes of a program's calls as a workload")
    record.add_argument("-o", metavar="FILE", type=Path, default=Path("workload.yaml"), help="default: workload.yaml")
    record.add_argument("program", nargs="+", metavar="COMMAND", help="after --: the program and its arguments")
    given = parser.parse_args(argv)
    command = given.command
    logging.basicConfig(format="%(message)s")
    if command == "calibrate":
        from nsa.tuning.calibrate import main as calibrate

        return calibrate()
    if command == "record-workload":
        from nsa.testing.workloads.record import main as record_workload

        return record_workload(given.program, given.o)
    try:
        print("\n".join(report()), flush=True)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:  # a setting cannot be parsed; the text names its file or variable
        print(f"nsa: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
