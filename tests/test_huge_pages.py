"""CPU kernels ask for huge pages for large results."""

import mmap
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from harness.process import run

import jax_fastops as fo

HUGE = 2 << 20
MAPS = Path("/proc/self/smaps")

pytestmark = pytest.mark.skipif(
    not (Path("/sys/kernel/mm/transparent_hugepage").exists() and MAPS.exists())
    or mmap.PAGESIZE != 4096
    or "LD_PRELOAD" in os.environ,
    reason="needs Linux with transparent huge pages of 2 MiB, and its own allocator",
)


def asked(*addresses: int) -> list[bool]:
    """For each address, whether its mapping is marked for huge pages (the flag "hg")."""
    mappings = []
    for line in MAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            mapping = range(*(int(part, 16) for part in first.split("-")))
        elif first == "VmFlags:":
            mappings.append((mapping, "hg" in rest))
    return [next(flag for mapping, flag in mappings if a in mapping) for a in addresses]


def pages(array: jax.Array) -> range:
    """The addresses of the huge pages that are entirely within an array."""
    begin = array.unsafe_buffer_pointer()
    return range(-(-begin // HUGE) * HUGE, (begin + array.nbytes) // HUGE * HUGE, HUGE)


def on_cpu(*shape: int) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), jax.devices("cpu")[0])


def result(function, *shape: int):
    """The results of `function`, 40 MiB each, which is memory fresh from the operating system."""
    with fo.use_implementation("native"):
        return jax.block_until_ready(jax.jit(function)(on_cpu(40, 512, *shape)))


@pytest.fixture
def plain_allocator():
    y = result(lambda x: x + 1, 512)
    if any(asked(*pages(y))):
        pytest.skip("the allocator itself asks for huge pages")


def check_asked(y):
    assert len(pages(y)) >= 18
    assert all(asked(*pages(y)))


def test_large_results_are_asked_for(plain_allocator):
    check_asked(result(fo.softmax, 512))


def test_every_result_is_asked_for(plain_allocator):
    for y in result(lambda x: fo.split_qkv_heads(x, num_heads=8), 3 * 512):
        check_asked(y)


def test_pages_shared_with_neighbours_are_left_alone(plain_allocator):
    y = result(fo.softmax, 512)
    first, last = y.unsafe_buffer_pointer(), y.unsafe_buffer_pointer() + y.nbytes - 1
    whole = range(pages(y).start, pages(y).stop)
    assert not any(asked(*(address for address in (first, last) if address not in whole)))


SWITCHED_OFF = """
import test_huge_pages as tests

y = tests.result(tests.fo.softmax, 512)
raise SystemExit(any(tests.asked(*tests.pages(y))))
"""


def test_can_be_switched_off(plain_allocator):
    done = run(SWITCHED_OFF, JAX_FASTOPS_HUGE_PAGES="0")
    assert done.returncode == 0, done.stderr
