"""``python -m jax_fastops`` prints what is installed and what runs where."""

import argparse
import sys

from jax_fastops import _selftest
from jax_fastops._info import describe

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m jax_fastops", description=__doc__)
    parser.add_argument("--selftest", action="store_true", help="check every op on each device")
    if parser.parse_args().selftest:
        sys.exit(_selftest.main())
    print(describe())
