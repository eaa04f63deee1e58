"""``python -m jax_fastops`` prints what is installed and what runs where."""

from jax_fastops._info import describe

if __name__ == "__main__":
    print(describe())
