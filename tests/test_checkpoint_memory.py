"""Memory while a checkpoint is loaded: one file and 1 GB on the host, the parameters on devices.

As a program, it loads a folder and prints the peaks. On a CPU, arrays of JAX are memory of the host
as well, so they are subtracted from the anonymous memory of the process. Pages of mapped files are
no anonymous memory: the system takes them back when it needs them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastops.models import decoder

SMALL = dataclasses.replace(
    decoder.SMALL,
    vocab_size=8192,
    hidden_size=512,
    layers=12,
    heads=8,
    head_dim=64,
    intermediate_size=2048,
    tied=True,
)
LARGE = dataclasses.replace(
    SMALL,
    vocab_size=64128,
    hidden_size=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    intermediate_size=8192,
)
FILES = 4


def values(name: str, count: int) -> np.ndarray:
    """The elements of a tensor in bfloat16, in one dimension."""
    period = (np.arange(251) + sum(map(ord, name))) % 251 / 251
    return np.resize(period.astype(jnp.bfloat16), count)


def written(folder: Path, config: decoder.Config) -> int:
    """Writes a checkpoint in bfloat16, in several files. Returns the bytes of the largest."""
    from safetensors.numpy import save_file

    from jax_fastops.models import decoder_checkpoint as checkpoint

    (folder / "config.json").write_text(json.dumps(checkpoint._written(config, "llama")))
    shapes = decoder.shapes(config)
    found = {}
    for name, leaf in checkpoint._leaves(config, checkpoint.TYPES["llama"]).items():
        shape = shapes
        for step in leaf.path:
            shape = shape[step]
        found[name] = leaf.tensor_shape(shape.shape)
    total, place = sum(map(np.prod, found.values())), 0
    files: dict[str, list] = {}
    for name, shape in found.items():
        files.setdefault(f"model-{FILES * place // total}.safetensors", []).append(name)
        place += np.prod(shape)
    for file, names in files.items():
        tensors = {n: values(n, np.prod(found[n])).reshape(found[n]) for n in names}
        save_file(tensors, folder / file)
    index = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return max((folder / file).stat().st_size for file in files)


def anonymous() -> int:
    """The anonymous memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def on_devices() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def measured(folder: str, param_dtype: str, scan: bool, twice: bool) -> dict:
    """Loads a folder, once or twice. Returns the peaks of the last time and what was loaded."""
    from jax_fastops.models import decoder_checkpoint

    if twice:  # compilation has memory of its own
        decoder_checkpoint.load(folder, param_dtype=param_dtype, scan=scan)
    sys.setswitchinterval(1e-4)
    before, peak, done = anonymous(), {"host": 0, "device": 0}, threading.Event()

    def watch():
        while not done.is_set():
            # While an array is donated, it is not listed. Arrays only become more, except for one
            # layer at a time, so the peak until now stands for what devices hold.
            both, peak["device"] = anonymous() - before, max(peak["device"], on_devices())
            peak["host"] = max(peak["host"], both - peak["device"])
            time.sleep(1e-3)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    _, params = decoder_checkpoint.load(folder, param_dtype=param_dtype, scan=scan)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    layers = params["layers"]
    down = layers["down"]["kernel"][3] if scan else layers[3]["down"]["kernel"]
    return peak | {
        "params": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "dtypes": sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)}),
        "table": np.asarray(params["embeddings"][-1, -4:], np.float32).tolist(),
        "down": np.asarray(down[-4:, -1], np.float32).tolist(),
        "seconds": seconds,
    }


def check(folder: Path, config: decoder.Config, param_dtype: str, scan: bool, more: float) -> None:
    largest = written(folder, config)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
    del environment["XLA_FLAGS"]  # of the tests: copies on eight devices, and without optimizations
    found = subprocess.run(
        [sys.executable, __file__, str(folder), param_dtype, str(int(scan)), str(int(more < 1e9))],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(found.stdout.splitlines()[-1])
    e, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    table = values("model.embed_tokens.weight", v * e)[-4:]
    down = values("model.layers.3.mlp.down_proj.weight", e * f)[-4:]
    assert found["table"] == table.astype(np.float32).tolist()
    assert found["down"] == down.astype(np.float32).tolist()
    assert found["dtypes"] == [param_dtype]
    assert found["device"] <= 1.1 * found["params"]
    assert found["host"] <= largest + more


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_memory(tmp_path, scan):
    """100 MB, and limits that are smaller by the same factor."""
    check(tmp_path, SMALL, "float32", scan, 50e6)


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_memory_of_2gb(tmp_path, scan, param_dtype):
    check(tmp_path, LARGE, param_dtype, scan, 1e9)


if __name__ == "__main__":
    folder, param_dtype, *flags = sys.argv[1:]
    print(json.dumps(measured(folder, param_dtype, *(bool(int(flag)) for flag in flags))))
