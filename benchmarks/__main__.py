"""Measures every case on the device that JAX has, shows a table, and writes JSON."""

import argparse
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import RESULTS


def main() -> None:
    options = parse()
    console = Console()
    benchmark(options, console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--ops", nargs="+", metavar="OP", help="these ops or families of ops (default: all)")
    add("--dtypes", nargs="+", metavar="DTYPE", help="these dtypes (default: all)")
    add("--filter", default="", metavar="TEXT", help="cases whose name contains TEXT")
    add("--scale", choices=("gpu", "cpu"), help="sizes (default: those of the platform)")
    add("--repeats", type=int, metavar="N", help="rounds (default: 25; with --quick, 5)")
    add("--quick", action="store_true", help="few rounds, float32 and bfloat16, sizes of a CPU")
    add("--clock", choices=("auto", "profiler", "chain", "wall"), default="auto")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS.name}/ here")
    add("--torch", action="store_true", help="PyTorch too, on a GPU where it is installed")
    options = parser.parse_args()
    options.rounds = options.repeats or (5 if options.quick else 25)
    if options.quick:
        options.dtypes = options.dtypes or ["float32", "bfloat16"]
    return options


def benchmark(options: argparse.Namespace, console: Console) -> None:
    """Run the cases, show them, and write ``<device>-<family>.json``."""
    from benchmarks import pytorch, report
    from benchmarks.cases import cases, select_ops
    from benchmarks.environment import platform_name
    from benchmarks.run import run

    if options.torch:
        pytorch.share_gpu()
    scale = options.scale or ("cpu" if options.quick or platform_name() == "cpu" else "gpu")
    chosen = list(cases(scale, select_ops(options.ops), options.dtypes, options.filter))
    if not chosen:
        raise SystemExit("no case fits these options")
    if options.torch and (reason := pytorch.unavailable()):
        console.print(f"no columns of PyTorch: {reason}")
        options.torch = False
    with progress(console, len(chosen)) as on_case:
        results = run(chosen, options.rounds, options.clock, on_case, options.torch)
    report.show(results, console)
    for path in report.save(results, options.out):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


@contextmanager
def progress(console: Console, total: int):
    """A callback for each case that starts: a bar on a terminal, a line elsewhere."""
    if not console.is_terminal:
        yield lambda index, case: console.print(f"[{index + 1}/{total}] {case.name}", markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("copy", total=total)
        yield lambda index, case: bar.update(task, completed=index, description=case.name)


if __name__ == "__main__":
    main()
