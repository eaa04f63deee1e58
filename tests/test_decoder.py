"""Decoders: FASTOPS and PLAIN agree in every variant; cache and generation; several devices.

test_decoder_checkpoint.py compares the model with transformers.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import make_mesh, strict, x64
from harness.numerics import assert_close_in_norm
from harness.programs import assert_strict, targets_of
from harness.sharding import KINDS, MESHES, collectives, device_count, over_meshes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.models import _products, bert, decoder, resnet
from jax_fastops.models._products import take_rows

pytestmark = pytest.mark.usefixtures("exact_products")

CONFIG = decoder.Config(
    vocab_size=40,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate_size=48,
    rope_theta=100.0,
    dtype="float32",
)
BATCH, SEQUENCE = 4, 11


@functools.cache
def start(config: decoder.Config) -> dict:
    """Parameters, none of which are all zero or all one."""
    rng = np.random.default_rng(0)

    def made(path, leaf):
        values = rng.standard_normal(leaf.shape).astype(np.float32)
        return 1 + 0.3 * values if path[-1].key == "scale" else 0.2 * values

    params = jax.tree.map_with_path(made, decoder.shapes(dataclasses.replace(config, scan=False)))
    return stacked(params) if config.scan else params


def stacked(params: dict) -> dict:
    return params | {"layers": jax.tree.map(lambda *a: np.stack(a), *params["layers"])}


def batch(
    config: decoder.Config = CONFIG, n: int = BATCH, length: int = SEQUENCE
) -> dict[str, np.ndarray]:
    """Tokens followed by padding. The second sequence is all padding."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, length + 1, n)
    lengths[:2] = length, 0
    tokens = rng.integers(0, config.vocab_size, (n, length)).astype(np.int32)
    return {"tokens": tokens, "mask": np.arange(length) < lengths[:, None]}


def step(config: decoder.Config, ops: decoder.Ops):
    return jax.value_and_grad(functools.partial(decoder.loss, config=config, ops=ops))


def stepped(config: decoder.Config, ops: decoder.Ops = decoder.FASTOPS, masked: bool = True):
    given = batch(config)
    if not masked:
        del given["mask"]
    tokens = given.pop("tokens")
    return jax.jit(step(config, ops))(start(config), tokens, **given)


def hidden_of(params, tokens, config=CONFIG, **options):
    return decoder.apply(params, tokens, config, **options)


# ---- architecture --------------------------------------------------------------------------------


def test_size():
    """As many parameters as Llama 3.2 1B has."""
    params = jax.eval_shape(lambda key: decoder.init(key, decoder.LLAMA_1B), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, decoder.shapes(decoder.LLAMA_1B)
    )
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(params)) == 1_235_814_400


def test_init():
    config = dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True, scan=True)
    params = decoder.init(jax.random.key(0), config)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, decoder.shapes(config))
    layers = params["layers"]
    assert (layers["k_norm"]["scale"] == 1).all() and (layers["q"]["bias"] == 0).all()
    assert 0.018 < layers["up"]["kernel"].std() < 0.022


def test_program_is_fused(native, without_cudnn):
    """The kernels of a step: one for each op forward, and one backward."""
    config = dataclasses.replace(CONFIG, attention="cudnn", qk_norm=True)
    tokens = batch()["tokens"]
    forward = functools.partial(hidden_of, config=config)
    counts = collections.Counter(targets_of(forward, start(config), tokens))
    assert sum(counts.values()) == len(targets_of(forward, start(config), tokens))
    # Two norms of a layer, and the last norm. Those of the heads are in the pass that splits them.
    assert sum(n for name, n in counts.items() if "norm" in name) == 2 * config.layers + 1
    assert counts["rotary_heads"] == config.layers
    assert sum(n for name, n in counts.items() if "gated_act" in name) == config.layers
    both = collections.Counter(targets_of(step(config, decoder.FASTOPS), start(config), tokens))
    assert sum(n for name, n in both.items() if "norm" in name) == 2 * (2 * config.layers + 1)
    assert sum(n for name, n in both.items() if "rotary" in name) == 2 * config.layers
    assert sum(n for name, n in both.items() if "gated_act" in name) == 2 * config.layers
    assert any("cross_entropy" in name for name in both)


def test_products_of_one_input_are_joined():
    def products(config):
        program = jax.make_jaxpr(functools.partial(hidden_of, config=config))
        return str(program(start(CONFIG), batch()["tokens"])).count("dot_general")

    # Each layer: qkv, two of the attention, output, gate and up, down.
    assert products(CONFIG) == 6 * CONFIG.layers
    assert products(dataclasses.replace(CONFIG, tensor_parallel=True)) == 9 * CONFIG.layers


# ---- variants ------------------------------------------------------------------------------------

NETWORKS = {
    "llama": {},
    "qwen2": dict(qkv_bias=True, tied=True),
    "qwen3": dict(qk_norm=True, tied=True),
    "biases-window": dict(qkv_bias=True, output_bias=True, sliding_window=4),
    "one-kv-head": dict(kv_heads=1, rope_scaling=decoder.RopeScaling(4.0, 1.0, 4.0, 16)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_twins_agree(native, name):
    config = dataclasses.replace(CONFIG, **NETWORKS[name])
    assert_close_in_norm(stepped(config), stepped(config, decoder.PLAIN), 2e-5)


VARIANTS = {
    "xla": dict(attention="xla"),
    "cudnn": dict(attention="cudnn"),
    "tensor-parallel": dict(tensor_parallel=True),
    "remat": dict(remat=True),
    "scan": dict(scan=True),
    "scan-remat": dict(scan=True, remat=True),
}


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree(native, without_cudnn, variant, masked):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant], sliding_window=5, qk_norm=True)
    plain = dataclasses.replace(CONFIG, sliding_window=5, qk_norm=True)
    loss, grads = stepped(plain, masked=masked)
    wanted = loss, stacked(grads) if config.scan else grads
    assert_close_in_norm(stepped(config, masked=masked), wanted, 2e-5)


@pytest.mark.parametrize("ops", [decoder.FASTOPS, decoder.PLAIN], ids=["ours", "plain"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(native, dtype, ops):
    low = stepped(dataclasses.replace(CONFIG, dtype=dtype), ops)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(low))
    assert_close_in_norm(low, stepped(CONFIG), 0.06 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_remat_keeps_less(native, scan):
    """Between forward and backward, a layer keeps its input."""

    def kept(config):
        run = functools.partial(hidden_of, tokens=batch()["tokens"], config=config)
        pullback = jax.eval_shape(lambda params: jax.vjp(run, params)[1], start(config))
        return sum(math.prod(a.shape) for a in jax.tree.leaves(pullback))

    config = dataclasses.replace(CONFIG, scan=scan)
    less = kept(dataclasses.replace(config, remat=True))
    parameters = sum(math.prod(a.shape) for a in jax.tree.leaves(decoder.shapes(config)))
    inputs = BATCH * SEQUENCE * CONFIG.hidden_size * (CONFIG.layers + 2)
    assert less < parameters + 2 * inputs < kept(config)


# ---- arguments -----------------------------------------------------------------------------------


def test_padding_is_not_seen(native):
    given = batch()
    other = np.where(given["mask"], given["tokens"], 7)
    a, b = (hidden_of(start(CONFIG), t, mask=given["mask"]) for t in (given["tokens"], other))
    np.testing.assert_array_equal(a[given["mask"]], b[given["mask"]])
    integers = hidden_of(start(CONFIG), given["tokens"], mask=given["mask"].astype(np.int32))
    np.testing.assert_array_equal(integers, a)


@pytest.mark.parametrize("attention", ["softmax", "xla"])
def test_later_tokens_are_not_seen(native, attention):
    config = dataclasses.replace(CONFIG, attention=attention, layers=1, sliding_window=3)
    tokens = batch()["tokens"]
    changed = tokens.copy()
    changed[:, 5] += 1
    a, b = (hidden_of(start(config), t, config) for t in (tokens, changed % CONFIG.vocab_size))
    differs = (np.abs(np.asarray(a) - b).max((0, 2)) > 1e-6).tolist()
    assert differs == [5 <= position < 5 + 3 for position in range(SEQUENCE)]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_tokens(dtype):
    config = dataclasses.replace(CONFIG, vocab_size=300)
    tokens = batch()["tokens"]
    narrow = tokens.astype(dtype)
    wanted = decoder.loss(start(config), tokens, config)
    assert_close_in_norm(decoder.loss(start(config), narrow, config), wanted, 1e-6)
    new, _ = decoder.generate(start(config), narrow, config, length=2)
    assert new.dtype == jnp.int32


@pytest.mark.parametrize("ops", [decoder.FASTOPS, decoder.PLAIN], ids=["ours", "plain"])
def test_tokens_outside_of_the_vocabulary(ops):
    """As in jnp.take: NaN for one that is too large, and a negative one counts from the end."""
    params, tokens = start(CONFIG), batch()["tokens"]
    run = jax.jit(functools.partial(hidden_of, ops=ops))
    wanted = run(params, tokens)
    np.testing.assert_array_equal(run(params, tokens - CONFIG.vocab_size), wanted)
    for token in (CONFIG.vocab_size, -CONFIG.vocab_size - 1):
        wrong = tokens.copy()
        wrong[1, 3] = token
        found = run(params, wrong)
        assert np.isnan(found[1, 3:]).all()
        np.testing.assert_array_equal(np.delete(found, 1, axis=0), np.delete(wanted, 1, axis=0))
        value, grads = jax.jit(step(CONFIG, ops))(params, wrong)
        assert np.isnan(value) and np.isnan(grads["norm"]["scale"]).all()


@pytest.mark.parametrize("which", ["ours", "plain", "xla"])
def test_padding_outside_of_the_vocabulary(which):
    """It changes nothing, for example with a token that a tokenizer has and a model has not."""
    attention = "xla" if which == "xla" else "softmax"
    config = dataclasses.replace(CONFIG, attention=attention, scan=True)  # compiles faster
    ops = decoder.PLAIN if which == "plain" else decoder.FASTOPS
    params, (tokens, mask) = start(config), batch().values()
    tokens, mask = np.delete(tokens, 1, axis=0), np.delete(mask, 1, axis=0)

    def run(tokens):
        hidden = hidden_of(params, tokens, config, mask=mask, ops=ops)
        given = dict(config=config, length=3, ops=ops)
        concrete = decoder.generate(params, tokens, mask=mask, **given)
        new = generate(params, tokens, mask=mask, **given), concrete
        return hidden[mask], jax.jit(step(config, ops))(params, tokens, mask=mask), new

    wanted = run(np.where(mask, tokens, 0))
    for token in (CONFIG.vocab_size, -CONFIG.vocab_size - 1, 2**31 - 1):
        with strict():
            found = run(np.where(mask, tokens, np.int32(token)))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for dtype in ("int8", "uint8"):  # too narrow for the vocabulary
        wide = dataclasses.replace(config, vocab_size=300)
        narrow = np.where(mask, tokens, 127).astype(dtype)
        assert np.isfinite(decoder.loss(start(wide), narrow, wide, mask=mask, ops=ops))


INDICES = np.array([[0, 3, 4, -1], [-4, -5, 100, 3]], np.int32)


def rows_of(table, index):
    """A table's rows at ``INDICES``, and the gradient of those that there are."""

    def total(table, weights):
        rows = take_rows(table, index, decoder.SMALL, decoder.FASTOPS)
        return jnp.where(jnp.isnan(rows), 0, rows * weights).sum(), rows

    weights = np.arange(INDICES.size, dtype=np.float32).reshape(*INDICES.shape, 1)
    (_, rows), gradient = jax.value_and_grad(total, has_aux=True)(table, weights)
    return rows, gradient


def check_rows(found):
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = np.full((*INDICES.shape, 2), np.nan, np.float32)
    gradient = np.zeros_like(table)
    for place, (at, index) in enumerate(np.ndenumerate(INDICES)):
        if -4 <= index < 4:
            rows[at] = table[index]
            gradient[index] += place
    np.testing.assert_array_equal(found[0], rows)
    np.testing.assert_array_equal(found[1], gradient)


def test_product_of_one_row(monkeypatch):
    """On a GPU, it is one of several rows, unless it is large or tiny."""
    x = jax.random.normal(jax.random.key(0), (1, 1, 1024))
    rows = []
    for size in (8, 1024, 10240):
        kernel = jax.random.normal(jax.random.key(1), (1024, size))
        expected = _products.dot(x, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            np.testing.assert_allclose(_products.dot(x, kernel), expected, rtol=1e-4, atol=1e-4)
            program = jax.make_jaxpr(_products.dot)(x, kernel)
        (product,) = (e for e in program.eqns if e.primitive.name == "dot_general")
        rows.append(product.invars[0].aval.size // 1024)
    assert rows == [1, 10, 1]


def test_take():
    check_rows(jax.jit(rows_of)(jnp.arange(8.0).reshape(4, 2), INDICES))


@pytest.mark.jax
@pytest.mark.parametrize("kind", KINDS)
def test_take_from_a_sharded_table(kind):
    if device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = make_mesh(MESHES["tensor"], KINDS[kind])
    table = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("tensor", None)))
    index = jax.device_put(INDICES, NamedSharding(mesh, P(None, "data")))
    with jax.set_mesh(mesh):
        check_rows(jax.jit(rows_of)(table, index))


def test_positions(native):
    tokens = batch()["tokens"]
    wanted = hidden_of(start(CONFIG), tokens)
    shifted = hidden_of(start(CONFIG), tokens, positions=np.arange(SEQUENCE) + 30)
    assert_close_in_norm(shifted, wanted, 1e-4)  # only differences matter
    each = np.tile(np.arange(SEQUENCE), (BATCH, 1))
    assert_close_in_norm(hidden_of(start(CONFIG), tokens, positions=each), wanted, 1e-6)
    stretched = hidden_of(start(CONFIG), tokens, positions=2 * np.arange(SEQUENCE))
    assert np.abs(np.asarray(stretched) - wanted).max() > 0.01


def test_rotary():
    """Pairs of features are complex numbers that are multiplied by others of absolute value 1."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    angles = rng.uniform(0, 9, (5, 4)).astype(np.float32)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None]
    wanted = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(decoder.rotary(x, angles), wanted, rtol=1e-5, atol=1e-5)


def test_labels(native):
    params, given = start(CONFIG), batch()
    tokens, mask = given["tokens"], given["mask"]
    labels = np.full(tokens.shape, -1)
    labels[:, :-1] = np.where(mask[:, 1:], tokens[:, 1:], -1)
    given_labels = decoder.loss(params, tokens, CONFIG, labels=labels, mask=mask)
    assert_close_in_norm(given_labels, decoder.loss(params, tokens, CONFIG, mask=mask), 1e-6)
    logits = decoder.logits(params, hidden_of(params, tokens, mask=mask), CONFIG)
    each = -np.take_along_axis(jax.nn.log_softmax(logits), labels[..., None] % 40, -1)[..., 0]
    np.testing.assert_allclose(given_labels, each[labels >= 0].mean(), rtol=1e-5)
    assert decoder.loss(params, tokens, CONFIG, labels=np.full(tokens.shape, -1)) == 0
    labels[0, 0] = CONFIG.vocab_size
    for ops in (decoder.FASTOPS, decoder.PLAIN):
        assert np.isnan(decoder.loss(params, tokens, CONFIG, labels=labels, mask=mask, ops=ops))


# ---- cache and generation ------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["softmax", "xla"])
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_cache(native, attention, scan, masked):
    """A sequence in parts gives what it gives as a whole."""
    config = dataclasses.replace(CONFIG, attention=attention, scan=scan, sliding_window=6)
    params, tokens = start(config), batch()["tokens"]
    mask = np.arange(SEQUENCE) >= np.array([0, 2, 4, 1])[:, None] if masked else None
    wanted = hidden_of(params, tokens, config, mask=mask)
    run = functools.partial(hidden_of, config=config)
    compiled = jax.jit(run)
    cache, found, begin = decoder.init_cache(config, BATCH, SEQUENCE + 3), [], 0
    for count in (5, 1, 4, 1):
        part = slice(begin, begin + count)
        own = None if mask is None else mask[:, part]
        # Outside of jit, the first call knows that the cache is empty.
        run_ = run if begin == 0 else compiled
        hidden, cache = run_(params, tokens[:, part], mask=own, cache=cache)
        found.append(hidden)
        begin += count
    assert int(cache.length) == SEQUENCE
    found, inside = np.concatenate(found, 1), np.ones(tokens.shape, bool) if mask is None else mask
    np.testing.assert_allclose(found[inside], np.asarray(wanted)[inside], rtol=1e-4, atol=1e-5)


generate = jax.jit(
    decoder.generate, static_argnames=("config", "length", "end", "top_k", "ops"), inline=True
)


@pytest.mark.parametrize("ops", [decoder.FASTOPS, decoder.PLAIN], ids=["ours", "plain"])
def test_greedy(native, ops):
    """Each token is the most probable one after those before it."""
    params, tokens = start(CONFIG), batch()["tokens"]
    new, lengths = generate(params, tokens, CONFIG, length=6, ops=ops)
    whole = np.concatenate([tokens, new], 1)
    logits = decoder.logits(params, hidden_of(params, whole), CONFIG)
    np.testing.assert_array_equal(new, logits.argmax(-1)[:, SEQUENCE - 1 : -1])
    assert lengths.tolist() == [6] * BATCH


def test_generates_with_64_bit_types(native):
    params, tokens = start(CONFIG), batch()["tokens"]
    options = dict(length=6, end=(3, 7), key=jax.random.key(2), top_k=5)
    wanted = generate(params, tokens, CONFIG, **options)
    with x64():
        found = generate(params, tokens, CONFIG, **options)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def padded(tokens: list, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one array, with padding on a side, and its mask."""
    longest = max(map(len, tokens)) + (side == "both")
    ids, mask = np.full((2, len(tokens), longest), 7)
    mask[:] = 0
    for row, own in enumerate(tokens):
        begin = {"left": longest - len(own), "right": 0, "both": 1}[side]
        ids[row, begin : begin + len(own)] = own
        mask[row, begin : begin + len(own)] = 1
    return ids.astype(np.int32), mask


@pytest.mark.parametrize("ops", [decoder.FASTOPS, decoder.PLAIN], ids=["ours", "plain"])
@pytest.mark.parametrize(
    "changes", [dict(layers=1), dict(attention="xla", sliding_window=4, scan=True)]
)
def test_padding_on_any_side(native, ops, changes):
    """Each prompt is continued as without padding."""
    config = dataclasses.replace(CONFIG, **changes)
    params, tokens = start(config), batch()["tokens"]
    prompts = [row[:n] for row, n in zip(tokens, (SEQUENCE, 2, 8, 2), strict=True)]
    wanted = [generate(params, own[None], config, length=5, ops=ops)[0][0] for own in prompts]
    sampled = []
    for side in ("left", "right", "both"):
        ids, mask = padded(prompts, side)
        options = dict(length=5, mask=mask, ops=ops)
        np.testing.assert_array_equal(generate(params, ids, config, **options)[0], wanted)
        sampled.append(generate(params, ids, config, key=jax.random.key(1), **options)[0])
    assert (sampled[0] != np.stack(wanted)).any()
    np.testing.assert_array_equal(sampled[1], sampled[0])
    np.testing.assert_array_equal(sampled[2], sampled[0])
    eager, _ = decoder.generate(params, ids, config, **options)
    np.testing.assert_array_equal(eager, wanted)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "qwen3-window"])
def test_generates_what_transformers_does(native, name):
    """Without padding, and with padding on the left and on the right."""
    pytest.importorskip("safetensors")
    from harness.recordings import Recordings

    from jax_fastops.models import decoder_checkpoint

    recorded = Recordings("decoder", decoder_checkpoint.load, usual="llama")
    arrays = recorded.arrays(name)
    prompt, wanted = arrays["inputs"]["input_ids"], arrays["generated"]
    config, params = decoder_checkpoint.load(recorded.folder / name, dtype="float32")
    run = functools.partial(generate, params, config=config, length=wanted["free"].shape[1])
    np.testing.assert_array_equal(run(prompt)[0], wanted["whole"])
    np.testing.assert_array_equal(run(prompt, mask=wanted["mask"])[0], wanted["free"])
    right = [row[inside != 0] for row, inside in zip(prompt, wanted["mask"], strict=True)]
    ids, mask = padded(right, "right")
    np.testing.assert_array_equal(run(ids, mask=mask)[0], wanted["free"])


@pytest.mark.parametrize("traced", [False, True], ids=["concrete", "traced"])
def test_temperature_of_0(native, traced):
    """It is greedy, and so are temperatures that are almost 0."""
    config = dataclasses.replace(CONFIG, layers=1)
    params, tokens = start(config), batch()["tokens"]
    wanted, _ = generate(params, tokens, config, length=4)

    def run(temperature, **options):
        given = dict(key=jax.random.key(2), **options)
        if traced:
            return generate(params, tokens, config, length=4, temperature=temperature, **given)[0]
        run = functools.partial(decoder.generate, length=4, temperature=temperature, **given)
        return jax.jit(run, static_argnums=2)(params, tokens, config)[0]

    for temperature in (0, 0.0, np.float32(0), jnp.zeros(()), 1e-20, 1e-35, 1e-44):
        np.testing.assert_array_equal(run(temperature), wanted)
    np.testing.assert_array_equal(run(0, top_k=5), wanted)
    assert (run(2) != wanted).any()
    np.testing.assert_array_equal(run(1), run(None))
    if traced:  # not checked, and documented
        for temperature in (-1.0, np.nan):
            np.testing.assert_array_equal(run(temperature), wanted)
    else:
        greedy = functools.partial(decoder.generate, length=4, temperature=0)
        found, _ = jax.jit(greedy, static_argnums=2)(params, tokens, config)
        np.testing.assert_array_equal(found, wanted)


def test_logits_that_are_equal():
    """A temperature of 0 takes the first one, as greedy."""
    params = start(CONFIG) | {"head": np.zeros((CONFIG.vocab_size, CONFIG.hidden_size), np.float32)}
    options = dict(length=3, key=jax.random.key(0), temperature=0.0)
    assert (generate(params, TOKENS, CONFIG, **options)[0] == 0).all()


@pytest.mark.parametrize(
    "end, same",
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.array(3), 3),
        (jnp.int32(3), 3),
        ([3, 7], (3, 7)),
        (np.array([3, 7]), (3, 7)),
        (jnp.array([3, 7]), (3, 7)),
        ((np.int32(3), 7), (3, 7)),
        (None, ()),
        ([], ()),
    ],
    ids=repr,
)
def test_kinds_of_end(end, same):
    params, tokens = start(CONFIG), batch()["tokens"]
    wanted = generate(params, tokens, CONFIG, length=8, end=same)
    run = functools.partial(decoder.generate, config=CONFIG, length=8, end=end)
    for found, one in zip(jax.jit(run)(params, tokens), wanted, strict=True):
        np.testing.assert_array_equal(found, one)


@pytest.mark.parametrize(
    "end, same",
    [
        (3, 3),
        (np.int64(3), 3),
        (np.uint8([3, 7]), (3, 7)),
        ([7, 3], (7, 3)),
        (lambda: jnp.array([3, 7]), (3, 7)),
        (lambda: [jnp.int32(3) + 0, 7], (3, 7)),
        (-1, ()),
    ],
    ids=lambda value: "made" if callable(value) else repr(value),
)
def test_traced_ends(end, same):
    """They are arguments of a program, or made in it."""
    params, tokens = start(CONFIG), batch()["tokens"]
    wanted, lengths = generate(params, tokens, CONFIG, length=8, end=same)
    run = functools.partial(decoder.generate, params, tokens, CONFIG, length=8)
    with strict():
        if callable(end):
            found = jax.jit(lambda: run(end=end()))()
        else:
            found = jax.jit(lambda end: run(end=end))(end)
    np.testing.assert_array_equal(found[1], lengths)
    for mine, theirs, n in zip(found[0], wanted, lengths.tolist(), strict=True):
        np.testing.assert_array_equal(mine[:n], theirs[:n])


@pytest.mark.parametrize("end", [True, 2.0, np.ones((2, 2), int)], ids=repr)
def test_wrong_traced_ends(end):
    with pytest.raises(TypeError, match=r"decoder: end is .*; it must be an"):
        jax.jit(functools.partial(decoder.generate, config=CONFIG, length=2))(
            start(CONFIG), TOKENS, end=end
        )


def test_a_loop_of_known_length():
    """Without tokens that end a sequence, XLA knows the number of steps, and asks for no value."""
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), CONFIG))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    for end, known in ((None, True), (0, False)):
        program = jax.jit(lambda p, t, end=end: decoder.generate(p, t, CONFIG, length=8, end=end))
        assert ("known_trip_count" in program.lower(params, tokens).compile().as_text()) == known


def test_one_token(native):
    new, lengths = generate(start(CONFIG), batch()["tokens"], CONFIG, length=1, end=3)
    assert new.shape == (BATCH, 1) and lengths.tolist() == [1] * BATCH


def test_ends(native):
    """A sequence ends at any of several tokens, and is filled with the first of them."""
    params, tokens = start(CONFIG), batch()["tokens"]
    free = np.asarray(generate(params, tokens, CONFIG, length=8)[0])
    ends = int(free[0, 2]), int(free[1, 4])
    new, lengths = generate(params, tokens, CONFIG, length=8, end=ends)
    for row, mine, n in zip(free, np.asarray(new), lengths.tolist(), strict=True):
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), 8)
        assert n == stop
        np.testing.assert_array_equal(mine, [*row[:stop], *[ends[0]] * (8 - stop)])


def test_sampling(native):
    params, key = start(CONFIG), jax.random.key(5)
    tokens = np.tile(batch()["tokens"][:1], (2000, 1))
    first = decoder.logits(params, hidden_of(params, tokens[:1])[:, -1], CONFIG)[0]
    options = dict(length=2, key=key)

    def frequencies(**more):
        new, _ = generate(params, tokens, CONFIG, **options, **more)
        return np.bincount(new[:, 0], minlength=CONFIG.vocab_size) / len(tokens)

    for temperature in (1.0, 3.0):
        wanted = jax.nn.softmax(first / temperature)
        assert np.abs(frequencies(temperature=temperature) - wanted).max() < 0.04
    best = np.argsort(first)[-3:]
    found = frequencies(top_k=3)
    np.testing.assert_allclose(found[best], jax.nn.softmax(first[best]), atol=0.04)
    assert found[best].sum() == pytest.approx(1)
    greedy, _ = generate(params, tokens[:2], CONFIG, length=2)
    np.testing.assert_array_equal(
        generate(params, tokens[:2], CONFIG, **options, top_k=1)[0], greedy
    )


@pytest.mark.parametrize("top_k", [None, 5])
def test_top_p(native, top_k):
    """Each new token is one of the fewest whose probabilities add up, and all of them are drawn."""

    def kept(logits, top_p):
        order = np.argsort(-logits)[:top_k]
        sums = np.cumsum(np.exp(logits[order] / 2.0, dtype=np.float64))
        return set(order[: 1 + np.searchsorted(sums, top_p * sums[-1])].tolist())

    params, tokens = start(CONFIG), np.repeat(batch()["tokens"], 500, axis=0)
    run = functools.partial(generate, params, tokens, CONFIG, length=2, top_k=top_k)
    counts = []
    for top_p in (1e-9, 0.3, 0.6):
        new, _ = run(key=jax.random.key(6), temperature=2.0, top_p=top_p)
        whole = np.concatenate([tokens, new], 1)
        logits = decoder.logits(params, hidden_of(params, whole), CONFIG)
        logits = np.asarray(logits)[:, SEQUENCE - 1 : -1]
        for row, mine in zip(logits, np.asarray(new), strict=True):
            assert all(t in kept(x, top_p) for x, t in zip(row, mine.tolist(), strict=True))
        drawn = set(np.asarray(new)[:500, 0].tolist())
        assert drawn == kept(logits[0, 0], top_p)
        counts.append(len(drawn))
    assert 1 == counts[0] < counts[1] < counts[2] < (top_k or CONFIG.vocab_size)


# ---- several devices -----------------------------------------------------------------------------

SHARDED = {
    "softmax": {},
    "xla-biases": dict(
        attention="xla", qkv_bias=True, output_bias=True, qk_norm=True, tied=True, sliding_window=9
    ),
    "scan-remat": dict(scan=True, remat=True),
}


def placed(mesh, config: decoder.Config, given: dict) -> tuple[dict, dict, NamedSharding]:
    """The parameters, and arrays of tokens, over a mesh, and the sharding of these."""
    axes = [name if name in mesh.axis_names else None for name in ("data", "sequence")]
    shardings = jax.tree.map(
        functools.partial(NamedSharding, mesh), decoder.partition_specs(config)
    )
    dealt = NamedSharding(mesh, P(*axes))
    return jax.device_put(start(config), shardings), jax.device_put(given, dealt), dealt


def run_over(mesh, config: decoder.Config, given: dict) -> tuple[Any, Any]:
    """Hidden states, and loss and gradients, each with the program's collectives."""
    params, given, dealt = placed(mesh, config, given)
    tokens = given.pop("tokens")
    # Gradients are sharded like parameters, as those that an optimizer adds to them.
    shardings = None, jax.tree.map(lambda a: a.sharding, params)

    def of(fn, **options):
        program = jax.jit(fn, **options).lower(params, tokens, **given).compile()
        return program(params, tokens, **given), collectives(program.as_text())

    with jax.set_mesh(mesh):
        hidden = of(functools.partial(hidden_of, config=config))
        both = of(step(config, decoder.FASTOPS), out_shardings=shardings)
    assert hidden[0].sharding.is_equivalent_to(dealt, 3)
    return hidden, both


@over_meshes(SHARDED)
def test_mesh(native, over, kind, name):
    """Only the communication that the layout implies, with shardings only: see the guide."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    sizes = MESHES[over]
    tensor, sequence = "tensor" in sizes, "sequence" in sizes
    config = dataclasses.replace(CONFIG, tensor_parallel=tensor, **SHARDED[name])
    given = batch(n=8, length=64)
    del given["mask"]
    hidden, both = run_over(make_mesh(sizes, KINDS[kind]), config, given)

    layers = 1 if config.scan else config.layers
    # The rows of the embeddings, and the outputs of attention and feed-forward. Keys and values.
    wanted = {"all-reduce": tensor * (1 + 2 * layers), "all-gather": sequence * 2 * layers}
    assert hidden[1] == {kind: count for kind, count in wanted.items() if count}
    counts = both[1]
    # Keys and values, again with remat, and the tokens from which the labels are made.
    shifts = sequence * (kind == "explicit")
    assert counts.pop("all-gather", 0) == (1 + config.remat) * 2 * layers * sequence + shifts
    assert counts.pop("collective-permute", 0) == sequence - shifts
    # In a layer, tensor has two sums forward, one of them again with remat, and two backward, and
    # sequence has that of the gradients of keys and values. Outside, tensor has four.
    sums = ((4 + config.remat) * tensor + sequence) * layers + 4 * tensor
    # The loss and the gradients of parameters are summed over each axis of the tokens. XLA combines
    # the gradients of parameters that are sharded alike, inside and outside of the scan.
    combined = (1 + (tensor and sequence)) * (1 + config.scan)
    assert counts.pop("all-reduce") <= sums + (1 + sequence) * (1 + combined)
    assert not counts
    check_mesh(config, given, hidden, both)


def check_mesh(config, given, hidden, both):
    plain = dataclasses.replace(config, tensor_parallel=False)
    alone = jax.jit(functools.partial(hidden_of, config=plain))(start(config), **given)
    wanted = jax.jit(step(plain, decoder.FASTOPS))(start(config), **given)
    assert_close_in_norm((hidden[0], both[0]), (alone, wanted), 2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("attention", ["softmax", "xla"])
@pytest.mark.parametrize("kind", KINDS)
def test_mesh_with_padding(native, kind, attention):
    """The mask of padding is gathered once, not in each layer."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    config = dataclasses.replace(CONFIG, tensor_parallel=True, attention=attention)
    given = batch(n=8, length=64)
    hidden, both = run_over(make_mesh(MESHES["all"], KINDS[kind]), config, given)
    assert hidden[1] == {"all-reduce": 1 + 2 * config.layers, "all-gather": 1 + 2 * config.layers}
    check_mesh(config, given, hidden, both)


@pytest.mark.jax
@pytest.mark.parametrize("kind", KINDS)
def test_mask_on_every_device(kind):
    """Tokens are sharded, and the mask is not."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    mesh, given = make_mesh(dict(data=2), KINDS[kind]), batch(n=8)
    wanted = jax.jit(hidden_of)(start(CONFIG), **given)
    params, mask = jax.device_put((start(CONFIG), given["mask"]), NamedSharding(mesh, P()))
    tokens = jax.device_put(given["tokens"], NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        assert_close_in_norm(jax.jit(hidden_of)(params, tokens, mask=mask), wanted, 1e-6)


@over_meshes(SHARDED)
def test_generation_over_a_mesh(native, over, kind, name):
    """The same tokens as on one device, and only the communication that the guide states."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    mesh, plain = make_mesh(MESHES[over], KINDS[kind]), dataclasses.replace(CONFIG, **SHARDED[name])
    tensor, sequence = "tensor" in mesh.axis_names, "sequence" in mesh.axis_names
    config = dataclasses.replace(plain, tensor_parallel=tensor)
    arrays = dict(tokens=batch(n=8, length=16)["tokens"])
    arrays["mask"] = np.arange(16) >= np.array([0, 2, 4, 1, 0, 0, 3, 5])[:, None]
    params, given, _ = placed(mesh, config, arrays)

    def run(names, length, **options):
        """The program's collectives."""
        wanted = generate(
            start(plain), config=plain, length=length, **{n: arrays[n] for n in names}, **options
        )
        mine = {n: given[n] for n in names}
        with jax.set_mesh(mesh):
            lowered = generate.lower(params, config=config, length=length, **mine, **options)
            program = lowered.compile()
            static = ("end", "top_k")
            new = program(params, **mine, **{n: o for n, o in options.items() if n not in static})
        assert new[0].sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
        for got, one in zip(new, wanted, strict=True):
            np.testing.assert_array_equal(got, one)
        return collectives(program.as_text())

    sampled = dict(key=jax.random.key(3), temperature=0.5)
    run(["tokens", "mask"], 1, top_k=3, top_p=0.9, **sampled)
    # The prompt, and the loop over new tokens: as in `test_mesh`, and the logits.
    layers = 1 if config.scan else config.layers
    reduced, gathered = 2 * tensor * (1 + 2 * layers), 2 * tensor + 2 * layers * sequence
    reduced += sequence  # the last hidden states of the prompt
    for names, options in ((["tokens"], {}), (["tokens", "mask"], sampled | dict(end=7))):
        counts = run(names, 6, **options)
        assert counts.pop("all-reduce", 0) == reduced + ("end" in options)
        # A prompt with a mask is moved to the right, as a whole.
        assert counts.pop("all-gather", 0) == gathered + 2 * ("mask" in names) * sequence
        assert counts.pop("collective-permute", 0) == sequence * (kind == "auto")
        assert not counts


@pytest.mark.jax
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("kind", KINDS)
def test_cache_over_a_mesh(native, kind, scan):
    """A sharded sequence in parts gives what it gives as a whole on one device."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    mesh, plain = make_mesh(MESHES["all"], KINDS[kind]), dataclasses.replace(CONFIG, scan=scan)
    config = dataclasses.replace(plain, tensor_parallel=True)
    tokens = batch(n=4, length=16)["tokens"]
    params, parts, _ = placed(mesh, config, dict(enumerate(np.split(tokens, 2, axis=1))))
    run = jax.jit(functools.partial(hidden_of, config=config))
    cache, found = decoder.init_cache(config, 4, 16), []
    with jax.set_mesh(mesh):
        for part in parts.values():
            hidden, cache = run(params, part, cache=cache)
            found.append(hidden)
    assert_close_in_norm(np.concatenate(found, 1), hidden_of(start(plain), tokens, plain), 2e-5)


# ---- errors --------------------------------------------------------------------------------------


def test_config_is_static():
    same = dataclasses.replace(CONFIG, layers=np.int64(2), dtype=jnp.float32, remat=np.False_)
    assert same == CONFIG and hash(same) == hash(CONFIG)
    assert isinstance(same.layers, int) and same.dtype == "float32"


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(layers=0), ValueError, "decoder: layers is 0; it must be 1 or more"),
        (dict(heads=2.0), TypeError, "heads is 2.0; it must be an integer"),
        (dict(heads=True), TypeError, "heads is True; it must be an integer"),
        (dict(kv_heads=3), ValueError, "kv_heads is 3, which does not divide heads, 4"),
        (dict(head_dim=5), ValueError, "head_dim is 5; it must be even"),
        (dict(sliding_window=0), ValueError, "sliding_window is 0; it must be 1 or more"),
        (dict(dtype="int8"), ValueError, "dtype is 'int8'; it must be one of"),
        (dict(attention="flash"), ValueError, "attention is 'flash'; it must be one of"),
        (dict(eps=-1.0), ValueError, r"eps is -1\.0; it must be 0 or more"),
        (dict(rope_scaling=(1, 2)), TypeError, "rope_scaling is of type tuple"),
        (dict(remat=2), TypeError, "remat is 2; it must be True or False"),
    ],
)
def test_config_errors(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


TOKENS = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    "function, changes, error, message",
    [
        (decoder.apply, dict(config=3), TypeError, "config is of type int; it must be a Config"),
        (decoder.apply, dict(ops=fo), TypeError, "ops is of type module; it must be an Ops"),
        (decoder.apply, dict(params={}), ValueError, r"params has no \['embeddings'\]"),
        (
            decoder.apply,
            dict(tokens=TOKENS * 1.0),
            TypeError,
            "tokens is of float32; it must be an",
        ),
        (decoder.apply, dict(tokens=TOKENS[0]), ValueError, r"tokens has shape \(3,\)"),
        (decoder.apply, dict(mask=TOKENS * 1.0), TypeError, "mask is of .*booleans or integers"),
        (decoder.apply, dict(mask=TOKENS[:, 1:]), ValueError, r"mask has shape \(2, 2\)"),
        (decoder.apply, dict(positions=TOKENS[:1]), ValueError, r"positions has shape \(1, 3\)"),
        (decoder.apply, dict(cache=()), TypeError, "cache is of type tuple; it must be a Cache"),
        (
            decoder.apply,
            dict(cache=decoder.init_cache(CONFIG, 3, 8)),
            ValueError,
            "the cache is for 3 sequences",
        ),
        (decoder.loss, dict(labels=TOKENS[0]), ValueError, r"labels has shape \(3,\)"),
        (decoder.loss, dict(labels=TOKENS * 1.0), TypeError, "labels is of float32"),
        (decoder.generate, dict(length=0), ValueError, "length is 0; it must be 1 or more"),
        (decoder.generate, dict(top_k=0, length=1), ValueError, "top_k is 0; it must be 1 or more"),
        (decoder.generate, dict(tokens=TOKENS[:, :0], length=1), ValueError, "1 token or more"),
    ],
)
def test_errors(function, changes, error, message):
    given = dict(params=start(CONFIG), tokens=TOKENS, config=CONFIG) | changes
    with pytest.raises(error, match=message):
        function(**given)


def test_errors_of_a_first_try():
    """A Config that ``jax.jit`` traces, that of another model, and a seed in place of a key."""
    with pytest.raises(TypeError, match=r"config is traced; .* \(jax\.jit has static_argnames\)"):
        jax.jit(decoder.apply)(start(CONFIG), TOKENS, 3)
    with pytest.raises(TypeError, match=r"decoder: config is of type \w+\.Config; it must"):
        decoder.apply(start(CONFIG), TOKENS, bert.SMALL)
    for model in bert, decoder, resnet:
        with pytest.raises(TypeError, match=r"key is int; it must be .*key\(0\)$"):
            model.init(0, model.SMALL)
        with pytest.raises(TypeError, match="config is of type PRNGKeyArray"):
            model.shapes(jax.random.key(0))


@pytest.mark.parametrize(
    "changes", [dict(layers=1), dict(attention="xla", layers=1), dict(scan=True, qk_norm=True)]
)
def test_empty_batch(changes):
    """Results are empty, and gradients are zeros."""
    config = dataclasses.replace(CONFIG, **changes)
    params, tokens = start(config), TOKENS[:0]
    assert hidden_of(params, tokens, config).shape == (0, 3, CONFIG.hidden_size)
    value, grads = step(config, decoder.FASTOPS)(params, tokens)
    assert value == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
    new, lengths = generate(params, tokens, config, length=4, end=3, mask=tokens)
    assert new.shape == (0, 4) and lengths.shape == (0,)


HOLE, EMPTY = np.array([[1, 1, 1], [1, 0, 1]]), np.array([[0, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(config=3), TypeError, "config is of type int"),
        (dict(params={}), ValueError, "params has no"),
        (dict(ops=None), TypeError, "ops is of type NoneType; it must be an Ops"),
        (dict(tokens=TOKENS * 1.0), TypeError, "tokens is of float32"),
        (dict(tokens=TOKENS[0]), ValueError, r"tokens has shape \(3,\)"),
        (dict(tokens=TOKENS + 40), ValueError, "tokens has 40; it must be from 0 to 39, below"),
        (dict(tokens=TOKENS - 1), ValueError, "tokens has -1; it must be from 0 to 39, below"),
        (dict(tokens=TOKENS + 40, mask=TOKENS + 1), ValueError, "tokens has 40; it must be from 0"),
        (dict(length=2.0), TypeError, r"length is 2\.0; it must be an integer"),
        (dict(length=None), TypeError, "length is None; it must be an integer"),
        (dict(length=True), TypeError, "length is True; it must be an integer"),
        (dict(length=-1), ValueError, "length is -1; it must be 1 or more"),
        (dict(end=2.0), TypeError, r"end is 2\.0; it must be an integer"),
        (dict(end=False), TypeError, "end is False; it must be an integer"),
        (dict(end="2"), TypeError, "end is '2'; it must be an integer"),
        (dict(end=[1, 2.0]), TypeError, r"end is 2\.0; it must be an integer"),
        (dict(end=np.ones((2, 2), int)), TypeError, r"end is .*; it must be an integer"),
        (dict(end=-1), ValueError, "end is -1; it must be 0 or more"),
        (dict(end=(3, 40)), ValueError, "end has 40; it must be from 0 to 39, below"),
        (dict(key=3), TypeError, "key is int; it must be a random key"),
        (dict(key=np.zeros(2)), TypeError, "key is float64; it must be a random key"),
        (dict(key=jax.random.split(jax.random.key(0))), ValueError, r"key has shape \(2,\)"),
        (dict(sampled=True, temperature=-1), ValueError, r"temperature is -1\.0; it must be 0 or"),
        (dict(sampled=True, temperature=np.nan), ValueError, "temperature is nan; it must be 0 or"),
        (dict(sampled=True, temperature=jnp.inf), ValueError, "temperature is inf; it must be 0"),
        (dict(sampled=True, temperature="1"), TypeError, "temperature is of type str"),
        (dict(sampled=True, temperature=True), TypeError, "temperature is of type bool"),
        (dict(sampled=True, temperature=1j), TypeError, "temperature is of type complex"),
        (dict(sampled=True, temperature=[1.0]), ValueError, r"temperature has shape \(1,\)"),
        (dict(sampled=True, top_k=2.0), TypeError, r"top_k is 2\.0; it must be an integer"),
        (dict(sampled=True, top_k=-1), ValueError, "top_k is -1; it must be 1 or more"),
        (
            dict(sampled=True, top_p=0),
            ValueError,
            r"top_p is 0\.0; it must be above 0, and at most",
        ),
        (dict(sampled=True, top_p=1.5), ValueError, r"top_p is 1\.5; it must be above 0, and at"),
        (dict(sampled=True, top_p=np.nan), ValueError, "top_p is nan; it must be above 0"),
        (dict(sampled=True, top_p="1"), TypeError, "top_p is of type str"),
        (dict(sampled=True, top_p=[0.5]), ValueError, r"top_p has shape \(1,\)"),
        (dict(top_p=0.5), ValueError, r"top_p is 0\.5, but key is None; sampling needs a key"),
        (dict(temperature=0.5), ValueError, r"temperature is 0\.5, but key is None"),
        (dict(temperature=1), ValueError, r"temperature is 1\.0, but key is None"),
        (dict(top_k=3), ValueError, "top_k is 3, but key is None; sampling needs a key"),
        (dict(top_k=3, temperature=0), ValueError, "top_k is 3, but key is None"),
        (dict(mask=TOKENS * 1.0), TypeError, "mask is of float32; it must be an array of boolean"),
        (dict(mask=TOKENS[:, 1:]), ValueError, r"mask has shape \(2, 2\)"),
        (dict(mask=HOLE), ValueError, "mask has padding between tokens in row 1"),
        (dict(mask=HOLE.tolist()), ValueError, "mask has padding between tokens in row 1"),
        (dict(mask=jnp.asarray(EMPTY)), ValueError, "mask has no token in row 1; each row must"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_of_generate(changes, error, message):
    given = dict(params=start(CONFIG), tokens=TOKENS, config=CONFIG, length=2) | changes
    if given.pop("sampled", False):
        given["key"] = jax.random.key(0)
    with pytest.raises(error, match=message):
        decoder.generate(**given)


@pytest.mark.parametrize("name, value", [("length", 2), ("top_k", 2)])
def test_static_arguments(name, value):
    """If they are traced, the error names them."""
    given = dict(params=start(CONFIG), tokens=TOKENS, length=2, key=jax.random.key(0))
    static = {key: given.pop(key) for key in ("length",) if key != name}
    run = functools.partial(decoder.generate, config=CONFIG, **static)
    with pytest.raises(TypeError, match=f"decoder: {name} is .*; it must be an integer"):
        jax.jit(run)(**given | {name: value})


@pytest.mark.parametrize("value", [True, 1j, np.ones(1)], ids=["bool", "complex", "array"])
def test_kinds_of_traced_temperatures(value):
    given = dict(params=start(CONFIG), tokens=TOKENS, config=CONFIG, length=2)
    with pytest.raises((TypeError, ValueError), match="decoder: temperature"):
        generate(**given, key=jax.random.key(0), temperature=value)


def test_traced_masks_are_not_checked():
    """Tokens do not attend to a hole."""
    tokens = np.array([[5, 6, 7]], np.int32)
    mask = np.array([[1, 0, 1]])
    found, _ = generate(start(CONFIG), tokens, CONFIG, length=3, mask=mask)
    tokens[0, 1] = 9
    again, _ = generate(start(CONFIG), tokens, CONFIG, length=3, mask=mask)
    np.testing.assert_array_equal(found, again)
    generate(start(CONFIG), tokens, CONFIG, length=3, mask=0 * mask)


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["native", "xla", "plain"])
def test_strict_settings(which):
    config = dataclasses.replace(CONFIG, **NETWORKS["biases-window"], dtype="bfloat16")
    config = dataclasses.replace(config, qk_norm=True)
    ops = decoder.PLAIN if which == "plain" else decoder.FASTOPS
    params, given = start(config), batch(config)
    mask = padded(list(given["tokens"]), "left")[1]
    options = dict(config=config, length=3, ops=ops, end=(3, 7))

    def run(params, given):
        both = step(config, ops)(params, **given)
        new = functools.partial(decoder.generate, params, given["tokens"], mask=mask, **options)
        return both, new(), new(key=jax.random.key(1), temperature=0.5, top_k=3, top_p=0.9)

    with fo.use_implementation("xla" if which == "xla" else "native"):
        assert_strict(run, params, given)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_under_strict_settings(native, without_cudnn, variant):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant], qkv_bias=True, dtype="bfloat16")
    given = batch(config)

    def run(params, given):
        new = decoder.generate(params, config=config, length=2, **given)
        return step(config, decoder.FASTOPS)(params, **given), new

    assert_strict(run, start(config), given)


def test_errors_of_logits():
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 31\); its last axis must be"):
        decoder.logits(start(CONFIG), jnp.ones((2, 31)), CONFIG)
