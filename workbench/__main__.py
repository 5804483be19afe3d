"""The command line: `python -m workbench demo|lab|report|player|replay|study|notebooks|fit|doctor|calibrate`.

Each command imports its packages when it is selected, so that `doctor` runs without the others' packages.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.extras import is_ours, missing


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser; options of the demo and of a fit, which need imports, are added for that `command` alone."""
    parser = argparse.ArgumentParser(prog="python -m workbench", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the demonstration without a browser and print its measurements")
    if command == "demo":
        from workbench.lessons.demo_options import add_arguments

        add_arguments(demo)
    lab = commands.add_parser("lab", help="open JupyterLab on 127.0.0.1 at the first notebook")
    report = commands.add_parser("report", help="write one HTML page from a recorded run, or from several side by side")
    report.add_argument("runs", nargs="+", type=Path, help="files of Recorder, or folders that contain run.jsonl.gz")
    report.add_argument("-o", "--out", type=Path, help="the page (default: report.html beside the first run)")
    player = commands.add_parser("player", help="write one script that plays a recorded step in any page")
    player.add_argument("run", type=Path, help="a file of Recorder, or a folder that contains run.jsonl.gz")
    player.add_argument("-o", "--out", type=Path, help="the script (default: player.js beside the run)")
    replay = commands.add_parser("replay", help="open recorded runs in JupyterLab, without a model")
    replay.add_argument("runs", nargs="+", type=Path, help="one run, or two to show side by side")
    study = commands.add_parser("study", help="run or resume a study without a notebook, and print its table")
    study.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a Python file that defines `study`, a workbench.Study; or folders of studies, to print one table of them",
    )
    study.add_argument("-o", "--out", type=Path, help="also save the figure: a name that ends in .pdf, .svg or .png")
    study.add_argument(
        "--accept-changes", action="store_true", help="go on although the study's functions have changed"
    )
    for opener in (lab, replay):
        opener.add_argument("--port", type=int, default=8888, help="first port to try (default: %(default)s)")
        opener.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    notebooks = commands.add_parser(
        "notebooks", help="execute notebooks and store them with their outputs, or copy them"
    )
    notebooks.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all of the repository)")
    mode = notebooks.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="execute nothing, only check the stored outputs")
    mode.add_argument("--to", type=Path, metavar="DIR", help="execute nothing, copy the notebooks to a folder")
    fit = commands.add_parser("fit", help="will a model fit? compare ways to train it on a card")
    if command == "fit":
        from workbench.commands.fit import add_arguments as add_fit_arguments

        add_fit_arguments(fit)
    commands.add_parser(
        "doctor", help="check versions, widgets, devices and free space; status 1 if something is missing"
    )
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine for forecasts and save the result; takes under 30 s"
    )
    calibrate.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:n (default: %(default)s)")
    calibrate.add_argument("--force", action="store_true", help="measure again, even if there is a saved result")
    return parser


def run(args: argparse.Namespace) -> int | None:
    """Run the selected command and return its exit status (None counts as 0)."""
    if args.command == "demo":
        from workbench.lessons import demo

        return demo.main(args)
    if args.command == "lab":
        from workbench.commands import lab_launcher

        return lab_launcher.main(args.port, args.no_browser)
    if args.command == "report":
        from workbench.runs import html_report

        return html_report.main(args.runs, args.out)
    if args.command == "player":
        from workbench.runs import player_script

        return player_script.main(args.run, args.out)
    if args.command == "replay":
        from workbench.commands import replay

        return replay.open_replay(args.runs, args.port, args.no_browser)
    if args.command == "study":
        from workbench.commands import study_runner

        return study_runner.main(args.paths, args.out, args.accept_changes)
    if args.command == "notebooks" and args.to is not None:
        from workbench.commands import copy_notebooks

        return copy_notebooks.main(args.to)
    if args.command == "notebooks":
        from workbench.commands import notebook_runner

        return notebook_runner.main(args.paths, args.check)
    if args.command == "fit":
        from workbench.commands import fit

        return fit.main(args)
    if args.command == "calibrate":
        from workbench.commands import calibrate

        return calibrate.main(args.device, args.force)
    from workbench.commands import doctor

    return doctor.main()


def main(argv: Sequence[str]) -> int | None:
    """Parse the arguments and run the command; print a remedy if a package is not installed."""
    try:
        # The parser is made inside the `try`, since the options of the demo need imports that may be missing.
        return run(build_parser(argv[0] if argv else None).parse_args(argv))
    except ModuleNotFoundError as error:
        if is_ours(error):
            raise
        print(missing(error.name), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
