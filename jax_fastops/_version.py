"""The version of the installed package, which the build takes from Git's tags."""

from importlib import metadata

try:
    __version__ = metadata.version("jax_fastops")
except metadata.PackageNotFoundError:  # a folder on the path
    __version__ = "0+unknown"
