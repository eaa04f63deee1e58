"""How long does attention take?

Forward and backward of the sum of random results, in one program, in steady state, each row in a
process of its own:

``ours``      ``attention``
``softmax``   ``attention`` without cuDNN: a softmax between two products
``plain``     ``jax.nn.dot_product_attention``, with dropout written by hand where there is any
``hand``      two products and a softmax in float32, written by hand in plain JAX
``autofuse``  ``hand`` through ``autofuse``
``cudnn``     ``jax.nn.dot_product_attention`` by cuDNN, on a GPU, without dropout. Segments are a
              mask
``torch``     PyTorch's ``scaled_dot_product_attention``, compiled, with its own dropout

A size is batch x length x heads x size of a head. In "window", a query attends to itself and to
the keys of the quarter of the length before it. In "segments", each row has four causal segments.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import DROP_RATE, fo, functional, plain_dropout
from benchmarks.processes import jax_calls, timed, torch_wait
from benchmarks.programs import temp_bytes

FORMS = ("ours", "softmax", "plain", "hand", "autofuse", "cudnn", "torch")
SIZES = ("32x512x12x64", "64x128x12x64", "8x2048x32x64", "4x4096x64x128")
KINDS = ("plain", "causal", "lengths", "dropout")
MORE = ("window", "segments")
SEGMENTS = 4


def options(add) -> None:
    add("--contenders", nargs="+", choices=FORMS, default=["ours", "plain"])
    add("--sizes", nargs="+", default=SIZES, help="for a CPU, for example 4x128x12x64")
    add("--kinds", nargs="+", choices=KINDS + MORE, default=KINDS)
    add("--dtype", default="bfloat16")


def rows(options):
    sizes = ("2x16x2x8",) if options.small else options.sizes
    return [
        dict(contender=name, size=size, kind=kind)
        for size in sizes
        for kind in options.kinds
        for name in options.contenders
        if (name, kind) != ("cudnn", "dropout") and not (name == "torch" and kind in MORE)
    ]


def shared(row: dict):
    return row["contender"] != "torch" and (row["size"], row["kind"])


def facts(options) -> dict:
    return dict(dtype=options.dtype, dropout_rate=DROP_RATE)


def lengths_of(batch: int, length: int) -> np.ndarray:
    """Uniform from half to all."""
    return np.random.default_rng(0).integers(length // 2, length + 1, batch).astype(np.int32)


def segments_of(batch: int, length: int) -> np.ndarray:
    """Rows of ids, in which segments end at random positions."""
    rng = np.random.default_rng(0)
    ends = np.stack([rng.choice(length - 1, SEGMENTS - 1, replace=False) for _ in range(batch)])
    return 1 + (np.arange(length) > np.sort(ends)[..., None]).sum(1).astype(np.int32)


def measure(options, contender: str, size: str, kind: str) -> dict:
    batch, length, heads, width = map(int, size.split("x"))
    lengths = lengths_of(batch, length) if kind == "lengths" else None
    if contender == "torch":
        return _of_torch(options, (batch, heads, length, width), kind, lengths)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (batch, length, heads, width), options.dtype) for key in keys[:3]
    )
    before = length // 4
    given: dict = {"is_causal": kind in ("causal", "segments")}
    if lengths is not None:
        given["key_value_seq_lengths"] = lengths
    if kind == "window":
        given["local_window_size"] = (before, 0)
    ids = segments_of(batch, length) if kind == "segments" else None
    drop = dict(dropout_key=keys[3], dropout_rate=DROP_RATE) if kind == "dropout" else {}

    def by_hand(q, k, v, key):
        row, column = jnp.arange(length)[:, None], jnp.arange(length)
        masks = {
            "causal": column <= row,
            "window": (column <= row) & (row - column <= before),
            "lengths": None if lengths is None else column < lengths[:, None, None, None],
            "segments": None
            if ids is None
            else (ids[:, None, :, None] == ids[:, None, None, :]) & (column <= row),
        }
        return _by_hand(q, k, v, masks.get(kind), key if drop else None)

    def attend(q, k, v, key):
        if contender in ("hand", "autofuse") or (contender == "plain" and drop):
            return by_hand(q, k, v, key)
        if contender in ("ours", "softmax"):
            more = {} if ids is None else dict(segment_ids=ids, max_segments=SEGMENTS)
            return fo.attention(q, k, v, **given, **more, **(drop and drop | {"dropout_key": key}))
        implementation = "cudnn" if contender == "cudnn" else "xla"
        if ids is not None:
            given["mask"] = ids[:, None, :, None] == ids[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **given)

    if contender == "autofuse":
        attend = fo.autofuse(attend, dropout=True)
    without = contextlib.nullcontext()
    if contender == "softmax":
        without = mock.patch.object(fo._cudnn, "limit", lambda *args: "not measured")

    def loss(q, k, v, key):
        return attend(q, k, v, key).astype(jnp.float32).sum()

    with without:
        step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, keys[3]).compile()
    found, _ = jax_calls(options, lambda: step(q, k, v, keys[3]))
    return found | {"temp_bytes": temp_bytes(step)}


def _by_hand(q, k, v, mask, key):
    """Attention as it is written in plain JAX."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    weights = weights if key is None else plain_dropout(weights, key)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _of_torch(options, shape, kind: str, lengths) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = dict(device=device, dtype=getattr(torch, options.dtype), requires_grad=True)
    q, k, v = (torch.randn(shape, **made) for _ in range(3))
    mask = None
    if lengths is not None:
        keys = torch.arange(shape[2], device=device)
        mask = (keys < torch.tensor(lengths, device=device)[:, None])[:, None, None, :]
    given = dict(attn_mask=mask, is_causal=kind == "causal")
    given["dropout_p"] = DROP_RATE if kind == "dropout" else 0.0

    def attend(q, k, v):
        return functional().scaled_dot_product_attention(q, k, v, **given).float().sum()

    compiled = torch.compile(attend)

    def call():
        torch.autograd.grad(compiled(q, k, v), (q, k, v))

    return timed(options, call, torch_wait(), torch=True)
