"""The package's version."""

from importlib import metadata

__version__ = metadata.version("jax_fastops")
