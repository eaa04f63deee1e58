"""The native module with the CUDA kernels."""

from typing import Any

def handlers() -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """FFI version -> target -> stage -> capsule."""

def build_info() -> dict[str, Any]:
    """How this module was built, and its kernels' limits."""

def workspace(name: str, a: int, b: int, c: int, /) -> int:
    """The size of a workspace, from three sizes."""

def bandwidth(device: int, /) -> float:
    """Bytes per second of a device's memory, or 0."""
