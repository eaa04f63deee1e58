"""Do cuDNN's graphs of convolution and batch norm shorten a step of ResNet-50?

Times cuDNN's graphs with parts of batch norm in a convolution's prologue or epilogue, and a product
of our own with the sums in its epilogue, against XLA's convolution followed by this package's batch
norm, for the convolutions of ResNet-50's stages. From the differences and the number of such
layers, it predicts the gain of a whole step. Results are checked against float64.

    g++ -std=c++20 -O1 -fPIC -shared -isystem FRONTEND -isystem CUDNN -isystem $CUDA/include
        benchmarks/trials/convolution_batch_norm.cc -o build/graphs.so
        $CUDA/lib64/libcudart_static.a -ldl -lrt -lpthread
    nvcc -std=c++20 -O3 -arch=sm_90 -Xcompiler=-fPIC -shared
        benchmarks/trials/product_sums.cu -o build/product.so
    python -m benchmarks.trials.convolution_batch_norm --library build/graphs.so
        --product build/product.so

FRONTEND and CUDNN are the headers of the wheels nvidia-cudnn-frontend and nvidia-cudnn-cu13.
"""

import argparse
import ctypes
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import installed, measure
from benchmarks.programs import Program
from benchmarks.report import Results

fo = installed("jax_fastops")

SUMS = {"sums", "stats", "dbn"}
IDS = "x w y sum sum2 scale bias mean rsigma dx bn_x z extra0 extra1 extra2".split()
PARTS = 32  # rows of sums that the product writes
WORKSPACE = 512 * measure.MIB
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """A convolution of ``c`` to ``k`` channels, unstrided."""

    n: int
    size: int
    c: int
    k: int
    window: int
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        sizes = f"{self.window}x{self.window} {self.c} to {self.k}, {self.size}x{self.size}"
        return f"{sizes}, {self.dtype}"

    @property
    def shapes(self) -> dict:
        x, y = ((self.n, self.size, self.size, channels) for channels in (self.c, self.k))
        return dict(x=x, w=(self.k, self.window, self.window, self.c), y=y, dx=x, bn_x=x, z=x)

    def channels(self, forward: bool) -> int:
        return self.k if forward else self.c


def layers(n: int, size: int, width: int, dtype: str) -> list[Layer]:
    """The three convolutions of a block of a stage."""
    wide = 4 * width
    sizes = ((wide, width, 1), (width, width, 3), (width, wide, 1))
    return [Layer(n, size, *of, dtype) for of in sizes]


# The layers of ResNet-50 that a trial's layer stands for: forward, any; backward, those whose data
# gradient is unstrided and goes to a batch norm. (stage, index of the convolution) -> numbers.
BLOCKS = (3, 4, 6, 3)


def counts(stage: int, index: int) -> tuple[float, float]:
    blocks = BLOCKS[stage]
    first = 0.0 if stage == 0 else 1.0
    if index == 0:  # the first block's has twice the size, as has its result
        return blocks + first, blocks - 1 + (stage < 3)
    if index == 1:
        return blocks, blocks - first
    return blocks + 1, blocks  # with the shortcut's


# ---- cuDNN ---------------------------------------------------------------------------------------


class Library:
    def __init__(self, path: Path):
        self.native = ctypes.CDLL(str(path))
        jax.devices()  # loads cuDNN

    def graph(self, words: str, layer: Layer, plans: int) -> "Graph":
        half = int(layer.dtype == "float16")
        sizes = (layer.n, layer.size, layer.c, layer.k, layer.window, half)
        graph, nbytes = ctypes.c_void_p(), ctypes.c_int64()
        message = ctypes.create_string_buffer(4000)
        count = self.native.trial_new(
            words.encode(),
            (ctypes.c_int64 * 6)(*sizes),
            ctypes.c_int64(plans),
            ctypes.c_int64(WORKSPACE),
            ctypes.byref(graph),
            ctypes.byref(nbytes),
            message,
            ctypes.c_size_t(len(message)),
        )
        text = message.value.decode(errors="replace")
        names = text.split(";") if count > 0 else []
        problem = "" if count > 0 else text
        return Graph(self.native, words, layer, graph, nbytes.value, names, problem)


@dataclass
class Graph:
    """A graph with its plans; a call runs one on buffers, and waits for it."""

    native: ctypes.CDLL
    words: str
    layer: Layer
    handle: ctypes.c_void_p
    workspace_bytes: int
    plans: list[str]
    problem: str
    plan: int = 0

    def __call__(self, buffers: dict) -> None:
        pointers = (ctypes.c_void_p * len(IDS))()
        for i, name in enumerate(IDS):
            pointers[i] = buffers[name].unsafe_buffer_pointer()
        workspace = ctypes.c_void_p(buffers["workspace"].unsafe_buffer_pointer())
        if self.native.trial_run(self.handle, self.plan, pointers, workspace):
            raise RuntimeError(f"{self.words}, {self.layer.label}: plan {self.plan} does not run")

    def choose(self, buffers: dict) -> None:
        """Takes the fastest plan."""
        times = {}
        for plan in range(len(self.plans)):
            self.plan = plan
            try:
                self(buffers)
            except RuntimeError:
                continue
            samples = []
            for _ in range(7):
                start = time.perf_counter()
                self(buffers)
                samples.append(time.perf_counter() - start)
            times[plan] = min(samples)
        if not times:
            self.problem = "no plan runs"
            return
        self.plan = min(times, key=times.get)


@dataclass
class Product:
    """The same by product_sums.cu, for 1x1 convolutions in bfloat16."""

    native: ctypes.CDLL
    words: str
    layer: Layer
    problem: str = ""
    plans = ("product_sums",)
    plan = 0

    def choose(self, buffers: dict) -> None:
        pass

    def __call__(self, buffers: dict) -> None:
        layer, has = self.layer, self.words.split()
        names = ["x", "w", None, None, None, "y", "parts", "parts2"]
        if has[0] == "data":
            other = "x" if "add" in has else None
            names = ["y", "w_transposed", other, "bn_x", "z", "dx", "parts", "parts2"]
        pointers = [name and buffers[name].unsafe_buffer_pointer() for name in names]
        n, k = (layer.k, layer.c) if has[0] == "forward" else (layer.c, layer.k)
        sizes = (layer.n * layer.size**2, n, k, PARTS)
        if error := self.native.product_sums(
            *map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, sizes)
        ):
            raise RuntimeError(f"{self.words}, {layer.label}: error {error}")


@partial(jax.jit, static_argnums=(0, 1))
def buffers(layer: Layer, forward: bool) -> dict:
    """Arrays for each name of a graph. Those of channels have enough for ``x`` and ``y``."""
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 20))
    made = {}
    for name, shape in layer.shapes.items():
        value = jax.random.normal(next(keys), shape, layer.dtype)
        made[name] = value * (layer.c * layer.window**2) ** -0.5 if name == "w" else value
    made["z"] = jnp.maximum(made["z"], 0)
    wide = max(layer.c, layer.k)
    for name in IDS:
        if name not in made:
            value = jax.random.uniform(next(keys), (wide,), jnp.float32, 0.5, 1.5)
            made[name] = value - 1.0 if name in ("mean", "bias") else value
    made["w_transposed"] = jnp.swapaxes(made["w"], 0, 3)
    for name in ("parts", "parts2"):
        made[name] = jax.random.uniform(next(keys), (PARTS, layer.k if forward else layer.c))
    if forward:  # parameters of the prologue have the arrays' dtype
        made |= {name: made[name].astype(layer.dtype) for name in ("scale", "bias")}
    made["workspace"] = jnp.zeros(WORKSPACE, jnp.uint8)
    return made


# ---- is it right? --------------------------------------------------------------------------------


def convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The unstrided convolution of NHWC by KRSC, in float64."""
    pad = w.shape[1] // 2
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    size = x.shape[1] - 2 * pad
    return sum(
        x[:, i : i + size, j : j + size] @ w[:, i, j].T
        for i in range(w.shape[1])
        for j in range(w.shape[2])
    )


def expected(words: str, layer: Layer, b: dict) -> dict:
    """What a graph returns, in float64."""
    a = {name: np.asarray(value, np.float64) for name, value in b.items() if name != "workspace"}
    has = words.split()
    n = {"forward": layer.c, "weights": layer.c, "data": layer.c}[has[0]]
    scale, bias, mean, rsigma = (a[name][:n] for name in ("scale", "bias", "mean", "rsigma"))
    x = a["x"]
    if "prologue" in has:
        x = np.asarray(jnp.asarray(np.maximum(x * scale + bias, 0), layer.dtype), np.float64)
    axes = (0, 1, 2)
    if has[0] == "forward":
        y = convolved(x, a["w"])
        return dict(y=y, sum=y.sum(axes), sum2=(y * y).sum(axes))
    if has[0] == "weights":
        pad = layer.window // 2
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        w = np.zeros(a["w"].shape)
        for i in range(layer.window):
            for j in range(layer.window):
                part = x[:, i : i + layer.size, j : j + layer.size].reshape(-1, layer.c)
                w[:, i, j] = a["y"].reshape(-1, layer.k).T @ part
        return dict(w=w)
    flipped = a["w"][:, ::-1, ::-1].transpose(3, 1, 2, 0)
    g = convolved(a["y"], flipped)
    centered = (a["bn_x"] - mean) * rsigma
    if "add" in has:
        g = g + a["x"]
    if "relu" in has:
        g = np.where(a["z"] > 0, g, 0)
    if "bits" in has:
        raw = np.asarray(b["z"]).view(np.uint8).reshape(-1)[: g.size // 8]
        g = g * np.unpackbits(raw, bitorder="little").reshape(g.shape)
    if "norm" in has:
        g = np.where(centered * scale + bias > 0, g, 0)
    other = centered if "dbn" in has else a["bn_x"]
    return dict(dx=g, sum=g.sum(axes), sum2=(g * other).sum(axes))


def error(graph: Graph | Product, given: dict) -> dict:
    """The largest error of each result, over the largest value."""
    right = expected(graph.words, graph.layer, given)
    for _ in range(2):  # the second call shows whether sums are cleared
        graph(given)
    if "product" in graph.words:
        given = given | {"sum": (given["parts"] + 0).sum(0), "sum2": (given["parts2"] + 0).sum(0)}
    wanted = {"dx", "y", "w"} & right.keys()
    if SUMS & set(graph.words.split()):
        wanted |= {"sum", "sum2"}
    if "sum" in graph.words.split():
        wanted |= {"sum"}
    found = {}
    for name in sorted(wanted):
        value = right[name]
        # A fresh copy: JAX may have the host's copy of this array from before the graph ran.
        array = np.asarray(given[name] + 0, np.float64)
        array = array if array.shape == value.shape else array[: value.shape[0]]
        found[name] = float(np.abs(array - value).max() / np.abs(value).max())
    return found


# ---- what XLA and this package do ----------------------------------------------------------------


def convolution(x, w):
    pad = [(w.shape[1] // 2,) * 2] * 2
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), pad, dimension_numbers=("NHWC", "OHWI", "NHWC")
    )


def data_gradient(dy, w, like):
    (dx,) = jax.linear_transpose(partial(convolution, w=w), like)(dy)
    return dx


def normalized(x, scale, bias, residual=None, fanout=False):
    return fo.batch_norm(x, scale, bias, activation="relu", residual=residual, fanout=fanout)[0]


def saving(y, scale, bias):
    """Batch norm, and the mask that its backward needs."""
    z, pullback = jax.vjp(partial(normalized, scale=scale, bias=bias), y)
    return z, [leaf for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.uint8]


def forward(x, w, scale, bias):
    """The convolution and this package's batch norm, as in training."""
    y = convolution(x, w)
    return y, saving(y, scale, bias)


def applied(y, total, squares, scale, bias):
    """Batch norm and ReLU from the sums of a convolution's epilogue."""
    total, squares = (a.sum(0) if a.ndim == 2 else a for a in (total, squares))
    count, n = y.size // y.shape[-1], y.shape[-1]
    mean = total[:n] / count
    factor = scale[:n] * jax.lax.rsqrt(squares[:n] / count - mean * mean + EPS)
    return jnp.maximum(factor * (y - mean) + bias[:n], 0).astype(y.dtype)


def gradient(g, x, total, products, mean, rsigma, scale):
    """The gradient of batch norm's input from the sums of a data gradient's epilogue."""
    total, products = (a.sum(0) if a.ndim == 2 else a for a in (total, products))
    count, n = x.size // x.shape[-1], x.shape[-1]
    total, products, mean, rsigma = (a[:n] for a in (total, products, mean, rsigma))
    slope = (products - mean * total) * rsigma * rsigma / count
    return (scale[:n] * rsigma * (g - total / count - (x - mean) * slope)).astype(x.dtype)


# ---- times ---------------------------------------------------------------------------------------


class Sequence:
    """A graph and a compiled program after it, as one program for the clock."""

    def __init__(self, graph: Graph, buffers: dict, after: Program | None = None):
        self.graph, self.buffers, self.after = graph, buffers, after

    def __call__(self):
        self.graph(self.buffers)
        return jax.block_until_ready(self.after()) if self.after else ()


def xla_programs(layer: Layer) -> dict[str, Program]:
    """XLA's convolution alone, and with this package's batch norm, in both directions."""
    shaped = {
        name: jnp.zeros(shape, layer.dtype)
        for name, shape in layer.shapes.items()
        if name in ("x", "w", "y")
    }
    x, w, y = shaped["x"], shaped["w"], shaped["y"]
    key = jax.random.key(1)
    x, y = (jax.random.normal(key, a.shape, a.dtype) for a in (x, y))
    w = jax.random.normal(key, w.shape, w.dtype) * 0.05
    out, into = (jnp.ones((n,), jnp.float32) for n in (layer.k, layer.c))
    wide = layer.window == 1 and layer.c > layer.k  # its input comes from an addition

    @jax.jit
    def saved(x):
        if wide:
            call = partial(normalized, fanout=True)
            return jax.vjp(call, x, into, into, x)[1]
        return jax.vjp(normalized, x, into, into)[1]

    def backward(dy, w, other, pullback):
        g = data_gradient(dy, w, x)
        return pullback((g, other) if wide else g)

    of = Program.of
    programs = {
        "xla forward": of("xla_forward", convolution, x, w),
        "xla forward, batch norm": of("xla_forward_norm", forward, x, w, out, out),
        "xla data": of("xla_data", lambda dy, w: data_gradient(dy, w, x), y, w),
        "xla data, batch norm": of("xla_data_norm", backward, y, w, x, saved(x)),
        "batch norm": of("norm", saving, y, out, out),
    }
    return programs


def products(native: ctypes.CDLL | None, layer: Layer) -> list[Product]:
    if native is None or layer.window > 1 or layer.dtype != "bfloat16":
        return []
    data = "data add bits product sums" if layer.c > layer.k else "data bits product sums"
    return [Product(native, words, layer) for words in ("forward product sums", data)]


def kinds(layer: Layer) -> list[str]:
    """The graphs that are timed for a layer."""
    wide = layer.window == 1 and layer.c > layer.k
    add = "data add " if wide else "data "
    found = ["forward", "forward sums", "forward prologue sums", "data", f"{add}relu sums"]
    found += ["data add bits sums"] if wide else ["data norm sums"]
    if layer.dtype == "float16":
        found = ["forward", "forward stats", "forward prologue stats", "data", "data norm dbn"]
        found += ["weights", "weights prologue"]
    return found


SMALL_PRODUCTS = (Layer(4, 16, 256, 64, 1), Layer(4, 16, 64, 128, 1), Layer(4, 16, 128, 512, 1))
CHECKED = {
    "bfloat16": (
        "forward stats",
        "forward prologue stats",
        "weights prologue",
        "data norm dbn",
        "data add relu sums",
        "data add bits sums",
        "forward prologue float sums",
    ),
    "float16": ("forward sums",),
}


@dataclass
class Prepared:
    """What is timed with the graphs of a layer: arrays and compiled programs."""

    buffers: dict[bool, dict]
    programs: dict[str, Program]
    after: dict[tuple[bool, bool], Program]  # what follows sums: forward?, by the product?


def prepare(layer: Layer) -> Prepared:
    arrays = {ahead: buffers(layer, ahead) for ahead in (True, False)}
    after = {}
    for product, sums in ((False, ("sum", "sum2")), (True, ("parts", "parts2"))):
        args = [arrays[True][name] for name in ("y", *sums, "scale", "bias")]
        after[True, product] = Program.of("applied", applied, *args)
        args = [arrays[False][k] for k in ("dx", "bn_x", *sums, "mean", "rsigma", "scale")]
        after[False, product] = Program.of("gradient", gradient, *args)
    return Prepared(arrays, xla_programs(layer), after)


def time_layer(
    layer: Layer, graphs: list[Graph | Product], prepared: Prepared, rounds: int
) -> dict:
    row: dict = {"layer": layer.label, "times_us": {}, "plans": {}, "problems": {}}
    timed = dict(prepared.programs)
    for graph in graphs:
        ahead = not graph.words.startswith("data")
        if not graph.problem:
            graph.choose(prepared.buffers[ahead])
        if graph.problem:
            row["problems"][graph.words] = graph.problem[:300]
            continue
        row["plans"][graph.words] = graph.plans[graph.plan]
        timed[graph.words] = Sequence(graph, prepared.buffers[ahead])
        if SUMS & set(graph.words.split()):
            program = prepared.after[ahead, "product" in graph.words]
            after = Sequence(graph, prepared.buffers[ahead], program)
            timed[f"{graph.words}, batch norm"] = after
    names = list(timed)
    turns = [index for _ in range(rounds) for index in random.sample(range(len(names)), len(names))]
    calls = measure.profiled_calls(list(timed.values()), turns)
    if len(calls) != len(turns):
        row["problem"] = f"the profile shows {len(calls)} of {len(turns)} calls"
        return row
    samples: dict[str, list] = {name: [] for name in names}
    kernels = {}
    for index, call in zip(turns, calls, strict=True):
        samples[names[index]].append(measure.busy(call) * 1e-3)
        kernels[names[index]] = [[k.name[:110], round(k.duration * 1e-3, 1)] for k in call]
    row["times_us"] = {name: statistics.median(values) for name, values in samples.items()}
    row["kernels"] = kernels  # of the last round
    return row


# ---- the whole -----------------------------------------------------------------------------------


def prediction(rows: dict, product: bool) -> dict:
    """Milliseconds that a step would gain, if each layer takes the faster form."""
    wide = 0  # the index of the convolutions whose data gradient is added to another cotangent
    total = {"forward": 0.0, "backward": 0.0}
    for (stage, index), row in rows.items():
        times = row["times_us"]
        for side, name, number in zip(
            ("forward", "backward"), ("forward", "data"), counts(stage, index), strict=True
        ):
            base = times.get(f"xla {name}, batch norm")
            ours = [
                value
                for key, value in times.items()
                if key.startswith(name) and key.endswith(", batch norm")
                if "prologue" not in key and (product or "product" not in key)
                if name == "forward" or ("add" in key.split()) == (index == wide)
            ]
            if base and ours:
                total[side] += max(base - min(ours), 0.0) * number / 1e3
    return {side: round(ms, 3) for side, ms in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", type=Path, help="convolution_batch_norm.cc as a library")
    parser.add_argument("--product", type=Path, help="product_sums.cu as a library")
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--plans", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--sides", type=int, nargs="*", default=[56, 28, 14, 7])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    options = parser.parse_args()
    library = Library(options.library) if options.library else None
    product = ctypes.CDLL(str(options.product)) if options.product else None
    results = Results(options.out, "convolution-batch-norm", batch=options.batch)
    wanted = [
        ((stage, index), layer)
        for dtype in options.dtypes
        for stage, (size, width) in enumerate(((56, 64), (28, 128), (14, 256), (7, 512)))
        if size in options.sides
        for index, layer in enumerate(layers(options.batch, size, width, dtype))
    ]
    small = [Layer(4, 14, 64, 32 * window, window, d) for d in options.dtypes for window in (1, 3)]
    # cuDNN's kernels are compiled by many threads. XLA's are not, because XLA times them meanwhile.
    few, many = options.plans, 5  # a plan of the generic engines takes a second
    pool = ThreadPoolExecutor(options.threads)
    graphs, checks = {}, []
    if library:
        graphs = {
            layer: [
                pool.submit(library.graph, of, layer, few if "sums" in of else many)
                for of in kinds(layer)
            ]
            for _, layer in wanted
        }
        checks = [
            pool.submit(library.graph, words, layer, 1)
            for layer in small
            for words in dict.fromkeys([*kinds(layer), *CHECKED[layer.dtype]])
        ]
    rows: dict[str, dict] = {}
    for place, layer in wanted:
        found = [future.result() for future in graphs.get(layer, ())] + products(product, layer)
        if not found:
            continue
        row = time_layer(layer, found, prepare(layer), options.rounds)
        results.add("rows", row)
        rows.setdefault(layer.dtype, {})[place] = row
        print(json.dumps({key: row[key] for key in row if key != "kernels"}), flush=True)
    results["prediction_ms"] = {
        f"{dtype}, {'with' if by else 'without'} the product": prediction(rows[dtype], by)
        for dtype in rows
        for by in (False, True)
    }
    print(results["prediction_ms"], flush=True)
    checked = [future.result() for future in checks]
    checked += [one for layer in SMALL_PRODUCTS for one in products(product, layer)]
    for graph in checked:
        results.add("checks", check(graph))
    results.end()


def check(graph: Graph | Product) -> dict:
    row: dict = {"graph": graph.words, "layer": graph.layer.label}
    try:
        if graph.problem:
            raise RuntimeError(graph.problem[:300])
        given = dict(buffers(graph.layer, not graph.words.startswith("data")))
        if "float" in graph.words:
            given |= {name: given[name].astype(jnp.float32) for name in ("scale", "bias")}
        row["errors"] = error(graph, jax.block_until_ready(given))
    except RuntimeError as problem:
        row["problem"] = str(problem)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
