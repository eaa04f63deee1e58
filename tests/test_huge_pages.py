"""CPU kernels ask for huge pages behind large results."""

import mmap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo

HUGE = 2 << 20
MAPS = Path("/proc/self/smaps")

pytestmark = pytest.mark.skipif(
    not (Path("/sys/kernel/mm/transparent_hugepage").exists() and MAPS.exists())
    or mmap.PAGESIZE != 4096,
    reason="needs Linux with transparent huge pages of 2 MiB",
)


def asked(address: int) -> bool:
    """Whether huge pages were asked for the mapping of this address: "hg" among its flags."""
    inside = False
    for line in MAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"no mapping at {address:#x}")


def pages(array: jax.Array) -> range:
    """Addresses of the whole huge pages of an array."""
    begin = array.unsafe_buffer_pointer()
    return range(-(-begin // HUGE) * HUGE, (begin + array.nbytes) // HUGE * HUGE, HUGE)


def on_cpu(shape, dtype=jnp.float32):
    return jax.device_put(np.ones(shape, dtype), jax.devices("cpu")[0])


def results(mebibytes: int):  # each of them
    """Of a kernel with one result, and of one with three."""
    x = on_cpu((mebibytes, 512, 512))
    yield jax.jit(fo.softmax)(x).block_until_ready()
    qkv = on_cpu((mebibytes, 512, 3 * 512))
    yield from jax.block_until_ready(jax.jit(lambda a: fo.split_qkv_heads(a, num_heads=8))(qkv))


def test_large_results_are_asked_for():
    with fo.use_implementation("native"):
        for y in results(40):
            assert len(pages(y)) >= 18
            assert all(asked(page) for page in pages(y))


def test_nothing_beside_the_result():
    """Where no whole page of 2 MiB fits between a result and its neighbours, nothing is asked."""
    with fo.use_implementation("native"):
        y = next(results(40))
    begin, end = y.unsafe_buffer_pointer(), y.unsafe_buffer_pointer() + y.nbytes
    # The allocator's own words lie in front of the array, in the same mapping to begin with.
    if begin % HUGE:
        assert not asked(begin)
    if end % HUGE:
        assert not asked(end - 1)
