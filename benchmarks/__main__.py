"""Runs a job: ``python -m benchmarks JOB``. Without a name it measures the ops."""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import RESULTS, jobs, processes

NAMES = [module.name for module in pkgutil.iter_modules(jobs.__path__)]


def main(arguments: Sequence[str]) -> None:
    named = bool(arguments) and not arguments[0].startswith("-")
    name, rest = (arguments[0], arguments[1:]) if named else ("ops", arguments)
    if name not in NAMES:
        raise SystemExit(f"no job {name!r}; jobs: {', '.join(NAMES)}")
    job = importlib.import_module(f"{jobs.__name__}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=job.__doc__,
        epilog=f"Jobs: {', '.join(NAMES)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", "--output", type=Path, default=RESULTS, metavar="DIR", help="of the results")
    if not hasattr(job, "run"):
        processes.options(add)
    job.options(add)
    options = parser.parse_args(rest)
    if hasattr(job, "run"):
        job.run(options)
    elif options.one:
        together = getattr(job, "measure_all", None)
        found = together and together(options, options.one)
        print(json.dumps(found or [job.measure(options, **row) for row in options.one]))
    else:
        processes.run(name, job, options, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
