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

def attention_plan(
    *,
    device: int,
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    size: int,
    packed: bool,
    bias_batch: int,
    bias_heads: int,
    bias_rows: int,
    wide_bias: bool,
    lengths: bool,
    segments: int,
    backward: bool,
    scale: float,
    before: int,
    after: int,
    rate: float,
    deterministic: bool,
) -> tuple[int, str]:
    """The bytes of workspace of cuDNN's plan for attention, and why there is no plan."""
