"""The native module with the CPU kernels."""

from typing import Any

def handlers() -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """FFI version -> target -> stage -> capsule."""

def build_info() -> dict[str, Any]:
    """How this module was built, and its kernels' limits."""

def workspace(name: str, a: int, b: int, c: int, /) -> int:
    """The size of a workspace, from three sizes."""
