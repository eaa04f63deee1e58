"""``python -m jax_fastops`` prints what is installed and what runs where."""

import argparse
import sys

from jax_fastops import _selftest
from jax_fastops._info import describe


def main() -> int:
    """Prints the description, or the table of the selftest. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_fastops", description=__doc__)
    parser.add_argument("--selftest", action="store_true", help="check every op on each device")
    if parser.parse_args().selftest:
        return _selftest.main()
    print(describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
