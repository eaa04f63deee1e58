"""Could one call for all layers of BERT-base shorten a forward in inference?

``encoder_layer.cu`` is a program of its own. It replays a CUDA graph of the 12 layers, without the
embeddings, on random data with padding. In a row,

- ``products``: by cuBLASLt with a kernel for bias and GELU; by cuBLASLt whose epilogue has them,
  with tanh in place of erf; or, up to 128 tokens, by tiles of this trial with their own epilogue;
- ``dependent``: whether kernels are programmatic dependent launches;
- ``graph``: whether a graph is replayed. Otherwise the host launches the kernels in each call;
- ``ms``: milliseconds of a forward, many in flight, and ``latency_ms`` of one that is waited for;
- ``apart``: the distance of the result from that of the first row of the shape, over its norm;
- ``qkv``, ``output``, ``up``, ``down``: the form of the product, and its microseconds.

At 32x512, the attention is left out. Then compare with a forward without the time of cuDNN.

``--program`` is the compiled file. By default, ``nvcc`` compiles it, with the header of the wheel
``nvidia-cublas``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.environment import facts, slug
from benchmarks.report import write

SOURCE = Path(__file__).with_suffix(".cu")


def of_wheels(pattern: str) -> Path:
    """A file of the wheels of CUDA."""
    folders = map(Path, sys.path)
    return next(path for folder in folders for path in sorted(folder.glob(f"nvidia/{pattern}")))


def compiled(folder: str) -> Path:
    program = Path(folder) / "encoder_layer"
    options = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]
    options += ["-gencode", "arch=compute_90a,code=sm_90a"]
    options += [f"-I{ROOT / 'src'}", f"-I{of_wheels('*/include/cublasLt.h').parent}"]
    subprocess.run(["nvcc", *options, SOURCE, "-o", program, "-ldl"], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = options.program or compiled(folder)
        command = [program, of_wheels("*/lib/libcublasLt.so.1?")]
        found = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    print(found)
    results = facts() | {"rows": [json.loads(line) for line in found.splitlines()]}
    path = options.out / f"encoder_layer-trial-{slug(results)}.json"
    write(path, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
