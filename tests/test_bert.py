"""BERT: FASTOPS and PLAIN agree in every variant; residuals; several devices.

test_bert_checkpoint.py compares the model with transformers.
"""

import collections
import dataclasses
import functools
import inspect
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from harness.case import SLOW
from harness.compat import make_mesh, x64
from harness.numerics import assert_close_in_norm, norm_errors
from harness.programs import assert_strict, equations, targets
from harness.sharding import (
    KINDS,
    MESHES,
    collectives,
    device_count,
    mesh_for,
    over_mesh,
    over_meshes,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastops as fo
from jax_fastops.models import _plain, bert

pytestmark = pytest.mark.usefixtures("exact_products", "looped_rounds")

CONFIG = bert.Config(
    vocab_size=41,
    hidden_size=32,
    layers=2,
    heads=4,
    intermediate_size=72,
    positions=16,
    dropout=0.0,
    attention_dropout=0.0,
    dtype="float32",
)
BATCH, SEQUENCE = 8, 12
OPS = {"ours": bert.FASTOPS, "plain": bert.PLAIN}
# Programs with the default generator of random bits take far longer to compile.
KEY = jax.random.key(3, impl="rbg")


@functools.cache
def start(config: bert.Config, mlm: bool = True) -> dict:
    """Parameters, none of which are all zero or all one."""
    rng = np.random.default_rng(0)

    def made(path, leaf):
        values = rng.standard_normal(leaf.shape).astype(np.float32)
        return 1 + 0.3 * values if path[-1].key == "scale" else 0.2 * values

    return jax.tree.map_with_path(made, bert.shapes(config, mlm=mlm))


def batch(config: bert.Config, n: int = BATCH) -> dict[str, np.ndarray]:
    """Tokens followed by padding. The second sequence is all padding."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, SEQUENCE + 1, n)
    lengths[:2] = SEQUENCE, 0
    return {
        "tokens": rng.integers(0, config.vocab_size, (n, SEQUENCE)),
        "mask": np.arange(SEQUENCE) < lengths[:, None],
        "token_types": rng.integers(0, config.token_types, (n, SEQUENCE)),
    }


def step(config: bert.Config, ops: bert.Ops):
    """A function of parameters, a batch and a random key or None; gives results and gradients."""

    def total(params, given, key):
        hidden, pooled = bert.apply(params, config=config, key=key, ops=ops, **given)
        rng = np.random.default_rng(2)
        weights = rng.standard_normal((*hidden.shape[1:], 2)).astype(np.float32)
        value = jnp.mean(hidden * weights[..., 0]) + jnp.mean(pooled * weights[0, :, 1])
        if "mlm" in params:
            logits = bert.masked_lm_logits(params, hidden[:, :4], config, ops=ops)
            value -= jnp.mean(jax.nn.log_softmax(logits)[..., 3])
        return value, {"hidden": hidden, "pooled": pooled}

    def run(params, given, key=None):
        (value, found), grads = jax.value_and_grad(total, has_aux=True)(params, given, key)
        return found | {"value": value, "gradients": grads}

    return run


@functools.cache
def stepped(config: bert.Config, ops: bert.Ops, masked: bool = True, dropped: bool = False):
    given = batch(config)
    if not masked:
        del given["mask"]
    key = KEY if dropped else None
    with fo.use_implementation("native"):
        return jax.tree.map(np.asarray, jax.jit(step(config, ops))(start(config), given, key))


# ---- architecture --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, parameters",
    [(bert.BASE, 109_482_240), (bert.LARGE, 335_141_888)],
    ids=["base", "large"],
)
def test_size(config, parameters):
    """As many parameters as transformers.BertModel has."""
    params = jax.eval_shape(lambda key: bert.init(key, config), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, bert.shapes(config))
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(params)) == parameters
    given = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    apply = functools.partial(bert.apply, config=config)
    hidden, pooled = jax.eval_shape(apply, params, given)
    assert (hidden.shape, hidden.dtype) == ((2, 16, config.hidden_size), jnp.bfloat16)
    assert (pooled.shape, pooled.dtype) == ((2, config.hidden_size), jnp.bfloat16)
    small = jax.tree.leaves(bert.shapes(bert.SMALL))
    assert sum(math.prod(a.shape) for a in small) < 1_000_000


def test_init():
    config = dataclasses.replace(CONFIG, init_range=0.5)
    heads = dict(mlm=True, nsp=True, labels=7, qa=True)
    params = jax.jit(bert.init, static_argnames=("config", *heads))(KEY, config=config, **heads)
    wanted = bert.shapes(config, **heads)
    assert wanted["classifier"]["kernel"].shape == (config.hidden_size, 7)
    assert wanted["qa"]["kernel"].shape == (config.hidden_size, 2)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wanted)
    for path, leaf in jax.tree.leaves_with_path(params):
        if leaf.ndim > 1:
            assert np.std(leaf) == pytest.approx(0.5, rel=5 / math.sqrt(leaf.size))
        else:
            assert np.all(leaf == float(path[-1].key == "scale"))
    first, second = (params["layers"][k]["up"]["kernel"] for k in (0, 1))
    assert not np.any(first == second)


def layer_program(config, ops, backward=False):
    params = bert.shapes(config)["layers"][0]
    x = jax.ShapeDtypeStruct((BATCH, SEQUENCE, config.hidden_size), config.dtype)
    mask = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.bool_)

    def layer(params, x, mask):
        return bert.encoder_layer(params, x, config, mask=mask, ops=ops)

    def gradients(params, x, mask):
        y, pullback = jax.vjp(lambda params, x: layer(params, x, mask), params, x)
        return pullback(y)

    return jax.jit(gradients if backward else layer), (params, x, mask)


@pytest.mark.jax
@pytest.mark.parametrize("attention", ["softmax", "xla", "cudnn"])
def test_layer_is_fused(native, without_cudnn, attention):
    """A layer calls four ops (three with XLA's attention) and six products."""
    config = dataclasses.replace(CONFIG, attention=attention)
    calls = []

    def spied(name, function):
        def call(*args, **options):
            calls.append((name, sorted(options)))
            return function(*args, **options)

        return call

    spies = bert.Ops(*map(spied, bert.Ops._fields, bert.FASTOPS))
    function, args = layer_program(config, spies)
    traced = function.trace(*args)
    norm = ("residual_layer_norm", ["eps", "fanout", "input_bias"])
    around = [norm, ("dense_act", ["activation"]), norm]
    inside = {
        "softmax": [("qkv_attention", ["mask", "num_heads"])],
        "xla": [],
        "cudnn": [("split_qkv_heads", ["num_heads"])],
    }
    assert calls == inside[attention] + around
    names = collections.Counter(e.primitive.name for e in equations(traced.jaxpr.jaxpr))
    assert names["dot_general"] == 6
    found = targets(traced.lower().compile().as_text())
    if attention == "softmax":  # merging heads is a transposition
        assert found == ["bias_act", "norm", "norm", "softmax", "split_heads", "transpose"]
    else:
        assert found == ["bias_act", "norm", "norm"] + ["split_heads"] * (attention == "cudnn")


@pytest.mark.jax
@pytest.mark.parametrize("attention", ["softmax", "cudnn"])
def test_backward_is_fused(native, without_cudnn, attention):
    """Each op has one kernel in the forward and one in the backward."""
    config = dataclasses.replace(CONFIG, attention=attention)
    function, args = layer_program(config, bert.FASTOPS, backward=True)
    program = function.lower(*args).compile().as_text()
    found = collections.Counter(targets(program))
    assert found["norm"] == found["norm_bwd"] == 2
    assert found["softmax"] == found["softmax_bwd"] == (attention == "softmax")
    assert found["bias_act"] == found["bias_act_bwd"] == 1
    assert found["split_heads"] == 1
    # One call merges the gradients of q, k and v. For cuDNN's attention, where it splits the biased
    # product, its second result sums the bias gradient.
    merges = [line for line in program.splitlines() if '"jax_fastops.merge_heads' in line]
    results = 1 + (attention == "cudnn")
    assert len(merges) == 1 and merges[0].split(" custom-call(")[0].count("f32[") == results


@pytest.mark.jax
def test_encoder_is_fused(native):
    """The backward of each norm adds the cotangents of the norm's two users."""
    config = dataclasses.replace(CONFIG, layers=3)
    params = bert.shapes(config)["layers"]
    x = jax.ShapeDtypeStruct((BATCH, SEQUENCE, config.hidden_size), config.dtype)

    def gradients(params, x):
        y, pullback = jax.vjp(lambda p, x: bert.encoder(p, x, config), params, x)
        return pullback(y)

    text = jax.jit(gradients).trace(params, x).lower().as_text()
    calls = [line for line in text.splitlines() if "@jax_fastops.norm_bwd" in line]
    # x, dy, mean, rstd, scale, and a second dy except for the last norm.
    counts = [line.split("(", 1)[1].split(")", 1)[0].count("%") for line in calls]
    assert sorted(counts) == [5] + 5 * [6]


# ---- FASTOPS and PLAIN ---------------------------------------------------------------------------

CASES = {
    "masked": (dict(), True, False),
    "masked-cudnn": (dict(attention="cudnn"), True, False),
    "dropout": (dict(dropout=0.2, attention_dropout=0.3, activation="relu"), False, True),
    "masked-dropout": (dict(dropout=0.2, attention_dropout=0.3, activation="gelu"), True, True),
    "hidden-dropout": (dict(dropout=0.2, attention="xla", activation="silu"), True, True),
}


@pytest.mark.jax
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.startswith("masked") else SLOW) for case in CASES],
)
def test_twins_agree(case, without_cudnn):
    """Results and the gradient of every parameter, including a sequence that is all padding."""
    changes, masked, dropped = CASES[case]
    config = dataclasses.replace(CONFIG, **changes)
    ours, plain = (stepped(config, ops, masked, dropped) for ops in (bert.FASTOPS, bert.PLAIN))
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(ours))
    assert_close_in_norm(ours, plain, 2e-5)
    assert min(np.linalg.norm(g) for g in jax.tree.leaves(ours["gradients"])) > 1e-4


@pytest.mark.parametrize("steps", [20, pytest.param(500, marks=SLOW)])
def test_loss_curves_with_dropout_coincide(native, steps):
    """Gradient descent with the same masks: the losses differ by rounding."""
    config = dataclasses.replace(CONFIG, dropout=0.1, attention_dropout=0.1)
    given, wanted = batch(config), np.random.default_rng(1).standard_normal(32)

    def curve(ops):
        def loss(params, key):
            hidden, _ = bert.apply(params, config=config, key=key, ops=ops, **given)
            return jnp.mean((hidden - wanted) ** 2)

        def update(params, key):
            found, gradients = jax.value_and_grad(loss)(params, key)
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients), found

        keys = jax.random.split(KEY, steps)
        return np.asarray(jax.jit(lambda p: jax.lax.scan(update, p, keys)[1])(start(config)))

    ours, plain = curve(bert.FASTOPS), curve(bert.PLAIN)
    assert plain[-1] < 0.9 * plain[0]
    np.testing.assert_allclose(ours, plain, rtol=2e-5 if steps < 100 else 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "xla"])
def test_twins_agree_in_full_depth(attention):
    """In float64, where only the order of sums may differ."""
    config = dataclasses.replace(
        CONFIG, layers=24, hidden_size=24, dropout=0.1, dtype="float64", attention=attention
    )
    config = dataclasses.replace(config, scan=True)  # compiles much faster
    with x64(), fo.use_implementation("native"):
        given = start(config), batch(config), KEY
        params = jax.tree.map(lambda a: a.astype(np.float64), given[0])
        ours, plain = (
            jax.jit(step(config, ops))(params, *given[1:]) for ops in (bert.FASTOPS, bert.PLAIN)
        )
        assert ours["hidden"].dtype == np.float64
        # jax.nn's attention computes the softmax in float32.
        assert_close_in_norm(ours, plain, 1e-9 if attention == "softmax" else 1e-4)


@pytest.mark.parametrize(
    "variant", ["remat", "scan-remat", *(pytest.param(v, marks=SLOW) for v in ("scan", "stacked"))]
)
def test_variants_agree(variant):
    """Dropout is also the same, because each layer has its own random key."""
    config = dataclasses.replace(CONFIG, **CASES["masked-dropout"][0])
    plain = stepped(config, bert.FASTOPS, True, True)
    changed = dataclasses.replace(config, remat="remat" in variant, scan="scan" in variant)
    params = start(config)
    given = bert.stack_layers(params) if variant in ("stacked", "scan-remat") else params
    with fo.use_implementation("native"):
        found = jax.jit(step(changed, bert.FASTOPS))(given, batch(config), KEY)
    found["gradients"] = bert.unstack_layers(found["gradients"])
    assert_close_in_norm(found, plain, 1e-5)


def test_stack_layers():
    params = start(CONFIG)
    stacked = bert.stack_layers(params)
    assert stacked["layers"]["up"]["kernel"].shape == (2, 32, 72)
    assert bert.stack_layers(stacked) is stacked and bert.unstack_layers(params) is params
    again = bert.unstack_layers(stacked)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


DROPPED = dataclasses.replace(CONFIG, dropout=0.2, attention_dropout=0.3)
HIDDEN = np.random.default_rng(0).standard_normal((BATCH, SEQUENCE, 32), np.float32)


def encoded(function, params):
    """The result of an encoder, and its gradients."""

    def run(params, x):
        y, pullback = jax.vjp(function, params, x)
        return y, pullback(jnp.cos(y))

    return jax.tree.map(np.asarray, jax.jit(run)(params, HIDDEN))


@functools.cache
def encoded_one_by_one(ops: bert.Ops):
    def one_by_one(params, x):
        for each, key in zip(params, jax.random.split(KEY, DROPPED.layers), strict=True):
            x = bert.encoder_layer(each, x, DROPPED, mask=batch(DROPPED)["mask"], key=key, ops=ops)
        return x

    return encoded(one_by_one, start(DROPPED)["layers"])


@pytest.mark.parametrize(
    ("ops", "variant"),
    [
        *(("ours", variant) for variant in ("plain", "stacked", "scan", "remat")),
        ("plain", "plain"),
        *(pytest.param("plain", v, marks=SLOW) for v in ("stacked", "scan", "remat")),
    ],
)
def test_encoder(native, variant, ops):
    """The encoder equals its layers one by one, including dropout, in every variant."""
    config = dataclasses.replace(DROPPED, scan=variant == "scan", remat=variant == "remat")
    params, mask = start(DROPPED)["layers"], batch(DROPPED)["mask"]
    given = bert.stack_layers({"layers": params})["layers"] if variant == "stacked" else params

    def together(params, x):
        return bert.encoder(params, x, config, mask=mask, key=KEY, ops=OPS[ops])

    y, (found, dx) = encoded(together, given)
    found = bert.unstack_layers({"layers": found})["layers"]
    assert_close_in_norm((y, (found, dx)), encoded_one_by_one(OPS[ops]), 1e-5)
    assert np.max(np.abs(y - HIDDEN)) > 0.1


@pytest.mark.slow
def test_implementations_agree():
    with fo.use_implementation("xla"):
        found = jax.jit(step(CONFIG, bert.FASTOPS))(start(CONFIG), batch(CONFIG))
    assert_close_in_norm(found, stepped(CONFIG, bert.FASTOPS), 1e-5)


@pytest.mark.jax
def test_plain_ops():
    """They have the signatures and the results of the functions of FASTOPS."""
    for functions in zip(bert.PLAIN, bert.FASTOPS, strict=True):
        mine, other = (inspect.signature(function).parameters for function in functions)
        for name in mine.keys() - {"dropout", "softmax", "softcap"}:  # those of PLAIN only
            assert mine[name].default == other[name].default
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, 3, 5, 24), np.float32)
    scale, bias, input_bias = rng.standard_normal((3, 24), np.float32)
    where = rng.random((5, 24)) < 0.7
    heads, grouped = x.reshape(3, 5, 6, 4), residual[..., :12].reshape(3, 5, 3, 4)
    drop = dict(dropout_key=KEY, dropout_rate=0.3)
    labels = rng.integers(-1, 6, (3, 5))
    calls = [
        ("split_qkv_heads", (x, bias), dict(num_heads=1)),
        ("qkv_attention", (x,), dict(num_heads=2, mask=where[:, :5], **drop)),
        ("qkv_attention", (x.reshape(3, 5, 3, 2, 4),), dict(num_heads=2)),
        ("attention", (heads, grouped, grouped), dict(mask=where[:, :5][None, None], **drop)),
        ("attention", (heads, heads, heads), dict(is_causal=True, local_window_size=(2, 0))),
        (
            "residual_layer_norm",
            (x, residual, scale, bias),
            dict(input_bias=input_bias, eps=1e-2, return_sum=True),
        ),
        ("layer_norm", (x,), {}),
        ("bias_act", (x, bias), {}),
        ("dense_act", (x, residual[0].T, bias[:5]), dict(activation="relu")),
        ("dense_act", (x, residual[0].T), {}),
        ("linear_cross_entropy", (x, residual[0], labels), {}),
        (
            "linear_cross_entropy",
            (x, residual[0], labels),
            dict(bias=bias[:5], where=labels > 1, label_smoothing=0.1, z_loss=0.1, softcap=2.0),
        ),
        ("linear_cross_entropy", (x, residual[0], labels), dict(reduction="none")),
        ("linear_cross_entropy", (x, residual[0], labels), dict(reduction="sum")),
    ]
    for name, args, options in calls:
        args = [jnp.asarray(a) for a in args]
        found, wanted = (getattr(ops, name)(*args, **options) for ops in (bert.PLAIN, bert.FASTOPS))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(native, dtype):
    """The error against float32 is at most 1.2 times that of plain JAX."""
    config = dataclasses.replace(CONFIG, dtype=dtype)
    given = start(CONFIG), batch(CONFIG)
    exact = stepped(CONFIG, bert.PLAIN)["hidden"]
    found = [
        jax.jit(functools.partial(hidden_of, config=config, ops=ops))(*given)
        for ops in (bert.FASTOPS, bert.PLAIN)
    ]
    assert all(hidden.dtype == dtype for hidden in found)
    mine, theirs = (np.linalg.norm(np.asarray(h, np.float32) - exact) for h in found)
    assert 0 < mine <= 1.2 * theirs
    assert mine < (0.02 if dtype == "bfloat16" else 0.003) * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_low_precision(dtype):
    """The error is bounded by that of plain JAX, on average and for each array."""
    config = dataclasses.replace(CONFIG, dtype=dtype)
    exact = stepped(CONFIG, bert.PLAIN)["gradients"]
    ours, plain = (stepped(config, ops)["gradients"] for ops in (bert.FASTOPS, bert.PLAIN))
    mine, theirs = (norm_errors(x, exact) for x in (ours, plain))
    assert np.mean(list(mine.values())) <= 1.2 * np.mean(list(theirs.values()))
    for path, value in mine.items():
        assert value <= 2 * theirs[path] + 1e-3, f"{path}: {value:.1e}, {theirs[path]:.1e}"


@pytest.mark.slow
def test_training(native):
    """The loss of predicting the tokens of a fixed batch falls as in plain JAX."""
    given = batch(CONFIG)
    curves = {}
    for ops in (bert.FASTOPS, bert.PLAIN):

        def loss(params, ops=ops):
            hidden, _ = bert.apply(params, config=CONFIG, ops=ops, **given)
            logits = jax.nn.log_softmax(bert.masked_lm_logits(params, hidden, CONFIG, ops=ops))
            return -jnp.mean(jnp.take_along_axis(logits, given["tokens"][..., None], -1))

        @jax.jit
        def update(params, loss=loss):
            value, grads = jax.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        params = bert.init(jax.random.key(0), CONFIG, mlm=True)
        losses = curves[ops] = []
        for _ in range(60):
            value, params = update(params)
            losses.append(float(value))
        assert losses[0] > 3 and losses[-1] < 0.2 * losses[0]
    assert np.max(np.abs(np.subtract(*curves.values()))) < 1e-2


# ---- masks, positions, dropout -------------------------------------------------------------------


def hidden_of(params, given, config=CONFIG, **options):
    return bert.apply(params, config=config, **given, **options)[0]


@pytest.mark.parametrize("ops", [bert.FASTOPS, bert.PLAIN], ids=["fastops", "plain"])
def test_masked_lm_loss(ops):
    """The loss of the logits: of all positions, of some by a mask, and of given positions."""
    rng = np.random.default_rng(0)
    params, hidden = start(CONFIG), rng.standard_normal((2, 7, CONFIG.hidden_size), np.float32)
    labels, where = rng.integers(-1, CONFIG.vocab_size, (2, 7)), rng.random((2, 7)) < 0.5
    logits = bert.masked_lm_logits(params, hidden, CONFIG)
    each, kept = fo.cross_entropy(logits, labels), (labels >= 0) & where
    loss = functools.partial(bert.masked_lm_loss, params, hidden, ops=ops, config=CONFIG)
    wanted = np.float32((each * kept).sum() / kept.sum())
    assert_close_in_norm(loss(labels, where=where), wanted, 1e-5)
    chosen = np.array([[1, 4, 6], [0, 5, 5]])
    some = np.take_along_axis(labels, chosen, 1)
    wanted = np.take_along_axis(np.asarray(each), chosen, 1).sum() / (some >= 0).sum()
    assert_close_in_norm(loss(some, positions=chosen), np.float32(wanted), 1e-5)
    assert loss(labels, where=np.zeros((2, 7), bool)) == 0


def test_padding_is_not_seen(native):
    """Tokens at padding do not affect the others. A mask may have integers."""
    given, params = batch(CONFIG), start(CONFIG)
    keep = given["mask"]
    found = jax.jit(hidden_of)(params, given)
    other = given | {
        "tokens": np.where(keep, given["tokens"], 7),
        "mask": 3 * keep.astype(np.int8),
    }
    again = jax.jit(hidden_of)(params, other)
    np.testing.assert_allclose(again[keep], found[keep], rtol=1e-5, atol=1e-5)
    unmasked = jax.jit(hidden_of)(params, {k: v for k, v in given.items() if k != "mask"})
    assert np.max(np.abs(unmasked[keep] - found[keep])) > 0.1
    np.testing.assert_allclose(unmasked[0], found[0], rtol=1e-5, atol=1e-5)


def test_defaults(native):
    """By default, token types are 0 and positions count from 0. Any positions may be given."""
    given = batch(CONFIG)
    tokens = given["tokens"]
    found, said, reversed_ = (
        jax.jit(hidden_of)(start(CONFIG), {"tokens": tokens} | more)
        for more in (
            {},
            {
                "positions": np.tile(np.arange(SEQUENCE), (BATCH, 1)),
                "token_types": np.zeros_like(tokens),
                "mask": np.ones_like(tokens),
            },
            {"tokens": tokens[:, ::-1], "positions": np.arange(SEQUENCE)[::-1]},
        )
    )
    np.testing.assert_allclose(said, found, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(reversed_[:, ::-1], found, rtol=1e-4, atol=1e-5)


def test_empty_batch(native):
    """Results are empty, and gradients are zeros."""
    config = dataclasses.replace(CONFIG, layers=1)
    given = {name: array[:0] for name, array in batch(config).items()}

    def total(params):
        hidden, pooled = bert.apply(params, config=config, **given)
        assert hidden.shape == (0, SEQUENCE, 32) and pooled.shape == (0, 32)
        return jnp.sum(hidden) + jnp.sum(pooled)

    value, gradients = jax.jit(jax.value_and_grad(total))(start(config))
    assert value == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize("name, count", [("tokens", 41), ("token_types", 2), ("positions", 16)])
def test_indices_outside_of_the_tables(name, count, ops):
    """NaN, as in jnp.take. There, a negative index counts from the end."""
    config = dataclasses.replace(CONFIG, layers=1)
    given = batch(config, n=2) | {"positions": np.tile(np.arange(SEQUENCE), (2, 1))}
    del given["mask"]
    run = jax.jit(functools.partial(step(config, ops), key=None))
    wanted = run(start(config), given)
    if name != "token_types":
        below = run(start(config), given | {name: given[name] - count})
        np.testing.assert_array_equal(below["hidden"], wanted["hidden"])
    for index in (count, -count - 1):
        wrong = given[name].copy()
        wrong[1, 3] = index
        found = run(start(config), given | {name: wrong})
        np.testing.assert_array_equal(found["hidden"][0], wanted["hidden"][0])
        assert np.isnan(found["hidden"][1]).all() and np.isnan(found["value"])
        assert np.isnan(found["gradients"]["embeddings"]["norm"]["scale"]).all()


@pytest.mark.parametrize("name, count", [("tokens", 41), ("token_types", 2), ("positions", 16)])
def test_padding_outside_of_the_tables(name, count):
    """It changes nothing."""
    config = dataclasses.replace(CONFIG, layers=1)
    given = batch(config, n=4) | {"positions": np.tile(np.arange(SEQUENCE), (4, 1))}
    given = {key: np.delete(array, 1, axis=0) for key, array in given.items()}
    mask, params = given["mask"], start(config, mlm=False)

    @jax.jit
    def run(given):
        def total(params):
            hidden, pooled = bert.apply(params, config=config, **given)
            hidden = jnp.where(mask[..., None], hidden, jnp.zeros_like(hidden))
            return hidden.sum() + pooled.sum(), (hidden, pooled)

        return jax.grad(total, has_aux=True)(params)

    wanted = run(given)
    for index in (count, -count - 1, 2**31 - 1):
        wrong = np.where(mask, given[name], index)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            found = run(given | {name: wrong})
        assert_close_in_norm(found, wanted, 1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_tokens(dtype):
    """The dtype of tokens may be too narrow for the number of rows in the table."""
    config = dataclasses.replace(CONFIG, layers=1, vocab_size=300)
    tokens = np.arange(100, 124).reshape(2, SEQUENCE)
    found, wanted = (
        jax.jit(functools.partial(hidden_of, config=config, ops=bert.PLAIN))(
            start(config, mlm=False), {"tokens": given}
        )
        for given in (tokens.astype(dtype), tokens)
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scale_of_dropout(dtype):
    """Kept elements are divided by the exact share, then rounded: 0.9 is no bfloat16."""
    config = dataclasses.replace(CONFIG, layers=1, dropout=0.1, dtype=dtype)
    bias = np.linspace(1, 2, 32, endpoint=False, dtype=np.float32)  # exact in bfloat16
    layer = start(config)["layers"][0]
    layer = layer | {"output": {"kernel": 0 * layer["output"]["kernel"], "bias": bias}}

    @jax.jit
    def attention(x):
        seen = []

        def residual_layer_norm(x, residual, *args, **options):
            x = x + options["input_bias"].astype(x.dtype)
            seen.append(bert.PLAIN.dropout(x, options["dropout_key"], options["dropout_rate"]))
            return residual

        ops = bert.PLAIN._replace(residual_layer_norm=residual_layer_norm)
        bert.encoder_layer(layer, x, config, key=KEY, ops=ops)
        return seen[0]

    found = np.asarray(attention(np.zeros((BATCH, SEQUENCE, 32), jnp.dtype(dtype))))
    wanted = np.broadcast_to((bias / np.float32(1 - 0.1)).astype(dtype), found.shape)
    kept = found != 0
    np.testing.assert_array_equal(found[kept], wanted[kept])
    assert 0.85 < np.mean(kept) < 0.95


def test_places_of_dropout():
    """Embeddings, attention weights, and the outputs of attention and feed-forward with bias."""
    config = dataclasses.replace(CONFIG, dropout=0.25, attention_dropout=0.5)
    seen = []

    masks = []

    def dropout(x, key, rate):
        if key is not None:
            masks.append(x.shape)
        return bert.PLAIN.dropout(x, key, rate)

    def residual_layer_norm(x, residual, *args, **options):
        def seeing(x, key, rate):
            seen.append(np.asarray(dropout(x, key, rate)))
            return seen[-1]

        return bert.PLAIN.residual_layer_norm(x, residual, *args, dropout=seeing, **options)

    spy = bert.PLAIN._replace(
        residual_layer_norm=residual_layer_norm,
        qkv_attention=functools.partial(
            bert.PLAIN.qkv_attention, softmax=functools.partial(_plain.softmax, dropout=dropout)
        ),
        dropout=dropout,
    )
    params = jax.tree.map(lambda a: a, start(config))  # new dicts
    for layer in params["layers"]:
        for product in ("output", "down"):
            kernel = layer[product]["kernel"]
            layer[product] = {"kernel": 0 * kernel, "bias": np.ones(32, np.float32)}
    given = batch(config)
    bert.apply(params, config=config, key=KEY, ops=spy, **given)
    assert len(seen) == 4
    zeros = []
    for x in seen:
        assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.75)}
        assert np.mean(x == 0) == pytest.approx(0.25, abs=0.03)
        zeros.append(x == 0)
    assert len({z.tobytes() for z in zeros}) == 4
    tokens, scores = (BATCH, SEQUENCE, 32), (BATCH, 4, SEQUENCE, SEQUENCE)
    assert masks == [tokens] + [scores, tokens, tokens] * 2
    masks.clear()
    bert.apply(params, config=config, ops=spy, **given)
    assert not masks


@pytest.mark.jax
def test_dropout_of_probabilities():
    """Half of them are dropped and the others doubled: the mean over keys does not change."""
    config = dataclasses.replace(CONFIG, attention_dropout=0.5, layers=1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, SEQUENCE, 32)).astype(np.float32)

    def residual_layer_norm(y, *_, **__):  # the attention's output
        return y

    spy = bert.PLAIN._replace(residual_layer_norm=residual_layer_norm)
    layer = start(config)["layers"][0] | {
        "up": {"kernel": np.zeros((32, 72), np.float32), "bias": np.zeros(72, np.float32)}
    }
    outputs = []

    def qkv_attention(*args, **options):
        outputs.append(bert.PLAIN.qkv_attention(*args, **options))
        return outputs[-1]

    spy = spy._replace(qkv_attention=qkv_attention)

    def attention(key):
        outputs.clear()
        bert.encoder_layer(layer, x, config, key=key, ops=spy)
        return outputs[0]

    exact = attention(None)
    found = jax.jit(jax.vmap(attention))(jax.random.split(jax.random.key(0), 4000))
    spread = np.std(found, axis=0)
    assert np.min(spread) > 0
    assert np.max(np.abs(np.mean(found, 0) - exact) / spread) < 6 / math.sqrt(4000)


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["native", "xla", "plain"])
def test_strict_settings(which):
    rates = dict(dropout=0.2, attention_dropout=0.3)
    config = dataclasses.replace(CONFIG, layers=1, dtype="bfloat16", **rates)
    given, ops = batch(config), bert.PLAIN if which == "plain" else bert.FASTOPS
    labels, masked = given["tokens"], given["mask"] & (given["tokens"] % 3 == 0)

    def loss(params, key=None):
        hidden, pooled = bert.apply(params, config=config, key=key, ops=ops, **given)
        loss = bert.masked_lm_loss(params, hidden, labels, config, where=masked, ops=ops)
        logits = bert.masked_lm_logits(params, hidden[:, :2], config, ops=ops)
        return loss + logits.mean() + pooled.astype(jnp.float32).mean()

    def run(params):
        return jax.value_and_grad(loss)(params, KEY), loss(params)

    with fo.use_implementation("xla" if which == "xla" else "native"):
        assert_strict(run, start(config))


@pytest.mark.parametrize(
    "changes",
    [
        dict(remat=True, scan=True),
        dict(tensor_parallel=True),
        dict(attention="xla"),
        dict(attention="cudnn"),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_variants_under_strict_settings(native, without_cudnn, changes):
    """Also with the defaults of the arguments."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", **changes)
    given = batch(config)

    def total(params, given):
        return sum(x.astype(jnp.float32).sum() for x in bert.apply(params, config=config, **given))

    for own in (given, {"tokens": given["tokens"].astype(np.int8)}):
        assert_strict(jax.grad(total), start(config), own)


# ---- residuals -----------------------------------------------------------------------------------


def residuals(config, ops, implementation="native", key=None):
    """Shapes and dtypes of the layers' residuals, except the parameters."""
    given = batch(config)

    def kept(params):
        return jax.tree.leaves(
            jax.vjp(lambda p: hidden_of(p, given, config, key=key, ops=ops), params)[1]
        )

    with fo.use_implementation(implementation):
        params = start(config, mlm=False)
        found = collections.Counter((a.shape, a.dtype.name) for a in jax.eval_shape(kept, params))
    return found - collections.Counter((a.shape, "float32") for a in jax.tree.leaves(params))


def size(kept) -> int:
    return sum(math.prod(s) * jnp.dtype(d).itemsize * n for (s, d), n in kept.items())


@pytest.mark.jax
@pytest.mark.parametrize("which", ["native", "xla", "plain"])
def test_remat_keeps_less(which):
    """It keeps statistics and arrays as large as the input: no scores, no inner activations."""
    ops = bert.PLAIN if which == "plain" else bert.FASTOPS
    implementation = "xla" if which == "plain" else which
    config = dataclasses.replace(CONFIG, layers=6)
    all_of_it = residuals(config, ops, implementation)
    kept = residuals(dataclasses.replace(config, remat=True), ops, implementation)
    tokens, scores = (BATCH, SEQUENCE, 32), (BATCH, 4, SEQUENCE, SEQUENCE)
    inside = {(BATCH, SEQUENCE, 72), (BATCH, SEQUENCE, 96), scores, (BATCH, 4, SEQUENCE, 8)}
    assert inside & {shape for shape, _ in all_of_it}
    assert not inside & {shape for shape, _ in kept}
    # Per layer: its input, the input of each norm, and the first norm's result.
    most = 4 * 6 + (3 if which == "native" else 6)
    assert sum(n for (shape, _), n in kept.items() if shape == tokens) <= most
    if which == "native":
        assert kept[(BATCH, SEQUENCE), "float32"] == 2 * (2 * 6 + 1)
    assert size(kept) < 0.4 * size(all_of_it)


@pytest.mark.jax
def test_no_masks_of_dropout_are_kept():
    config = dataclasses.replace(CONFIG, dropout=0.1, attention_dropout=0.1, remat=True)
    kept = residuals(config, bert.FASTOPS, key=KEY)
    tokens, scores = (BATCH, SEQUENCE, 32), (BATCH, 4, SEQUENCE, SEQUENCE)
    assert (tokens, "bool") not in kept and (scores, "bool") not in kept
    assert (scores, "float32") not in kept


@pytest.mark.jax
@pytest.mark.parametrize("which", ["native", "plain"])
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_remat_repeats_less(which, scan):
    """The two products before the norms are not repeated, because the norms' inputs are kept."""
    ops = bert.FASTOPS if which == "native" else bert.PLAIN
    counts = []
    for remat in (False, True):
        config = dataclasses.replace(CONFIG, remat=remat, scan=scan)
        with fo.use_implementation("native"):
            program = jax.make_jaxpr(step(config, ops))(start(config, False), batch(config))
        names = collections.Counter(e.primitive.name for e in equations(program.jaxpr))
        counts.append(names["dot_general"])
    assert counts[1] - counts[0] == 4 * (1 if scan else CONFIG.layers)


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("attention", ["softmax", "xla", "cudnn"])
def test_vmap(native, without_cudnn, attention):
    """Maps over batches, and over parameters as for an ensemble."""
    config = dataclasses.replace(CONFIG, layers=1, attention=attention)
    params, given = start(config), batch(config)
    split = {k: v.reshape(2, BATCH // 2, SEQUENCE) for k, v in given.items()}
    wanted = jax.jit(hidden_of, static_argnums=2)(params, given, config)
    run = functools.partial(hidden_of, config=config)
    found = jax.jit(jax.vmap(run, in_axes=(None, 0)))(params, split)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)
    both = jax.tree.map(lambda a: np.stack([a, 0 * a]), params)
    found = jax.jit(jax.vmap(run, in_axes=(0, None)))(both, given)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-5)
    assert not np.any(found[1])


@pytest.mark.jax
def test_export(native):
    """An exported program is serialized, deserialized and called."""
    params, given = start(CONFIG, mlm=False), batch(CONFIG)
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    exported = jax.export.export(
        jax.jit(hidden_of), platforms=(platform,), disabled_checks=fo.export_checks()
    )(params, given)
    again = jax.export.deserialize(exported.serialize())
    found, wanted = again.call(params, given), jax.jit(hidden_of)(params, given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


# ---- several devices -----------------------------------------------------------------------------


@functools.cache
def on_one_device(attention: str = "softmax"):
    config = dataclasses.replace(CONFIG, attention=attention)
    with fo.use_implementation("native"):
        given = start(config), batch(config, 16)
        return jax.tree.map(np.asarray, jax.jit(step(config, bert.FASTOPS))(*given))


def over_devices(axis_type, make):
    """Runs ``make(mesh)`` on a sharded batch; returns the results and the compiled program."""
    mesh = mesh_for(axis_type, 1, "batch")
    given = start(CONFIG), batch(CONFIG, 16)
    return over_mesh(mesh, lambda *args: make(mesh)(*args), given, (P(), P("batch")))


VARIANTS = {
    "auto": (AxisType.Auto, {}),
    "explicit": (AxisType.Explicit, {}),
    "scan-remat": (AxisType.Auto, dict(scan=True, remat=True)),
    "xla": (AxisType.Auto, dict(attention="xla")),
    "cudnn": (AxisType.Auto, dict(attention="cudnn")),
    "explicit-cudnn": (AxisType.Explicit, dict(attention="cudnn")),
}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.jax] * (v in ("auto", "explicit"))) for v in VARIANTS],
)
def test_sharded_batch(native, without_cudnn, variant):
    """The only communication is the sum of gradients and of the loss."""
    axis_type, changes = VARIANTS[variant]
    config = dataclasses.replace(CONFIG, **changes)
    found, program = over_devices(axis_type, lambda mesh: step(config, bert.FASTOPS))
    counts = collectives(program)
    leaves = len(jax.tree.leaves(bert.shapes(CONFIG, mlm=True)))
    # Gradients of all parameters, and the loss, which is three sums.
    assert 0 < counts.pop("all-reduce") <= leaves + 3
    assert not counts
    assert found["hidden"].sharding.shard_shape(found["hidden"].shape)[0] == 16 // device_count()
    assert_close_in_norm(jax.tree.map(np.asarray, found), on_one_device(config.attention), 2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("ops", OPS)
def test_sharded_dropout(native, ops):
    """Over Explicit axes, dropout masks are sharded and equal those of one device."""
    count = device_count()
    if count < 2:
        pytest.skip("needs two devices")
    config = dataclasses.replace(CONFIG, layers=1, dropout=0.2, attention_dropout=0.3)
    layer = start(config)["layers"][0]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, SEQUENCE, 32)).astype(np.float32)
    mask = batch(config, 16)["mask"]

    def run(layer, x, mask):
        return bert.encoder_layer(layer, x, config, mask=mask, key=KEY, ops=OPS[ops])

    wanted = jax.jit(run)(layer, x, mask)
    mesh = make_mesh({"batch": count}, AxisType.Explicit)
    split = NamedSharding(mesh, P("batch"))
    with jax.set_mesh(mesh):
        given = jax.device_put(layer, NamedSharding(mesh, P())), *jax.device_put((x, mask), split)
        compiled = jax.jit(run).lower(*given).compile()
        found = compiled(*given)
    assert not collectives(compiled.as_text())
    assert found.sharding.is_equivalent_to(split, 3)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.jax
@pytest.mark.parametrize("attention", ["softmax", "cudnn"])
def test_shard_map(native, without_cudnn, attention):
    """The same results under shard_map."""
    config = dataclasses.replace(CONFIG, attention=attention)

    def make(mesh):
        def run(params, given):
            found = step(config, bert.FASTOPS)(params, given)
            # Gradients of replicated arrays are summed over the devices.
            grads = jax.tree.map(lambda g: g / mesh.size, found["gradients"])
            return found["hidden"], grads

        return jax.shard_map(
            run, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P("batch"), P())
        )

    (hidden, grads), program = over_devices(AxisType.Auto, make)
    assert set(collectives(program)) == {"all-reduce"}
    wanted = on_one_device(attention)
    assert_close_in_norm(np.asarray(hidden), wanted["hidden"], 2e-5)
    assert_close_in_norm(jax.tree.map(np.asarray, grads), wanted["gradients"], 2e-5)


@pytest.mark.jax
@pytest.mark.parametrize("what", ["key", "mask"])
def test_shard_map_of_one_batch(what):
    """All devices have the same tokens, but different dropout or padding."""
    if device_count() < 2:
        pytest.skip("needs two devices")
    config = dataclasses.replace(CONFIG, layers=1, scan=True, attention_dropout=0.1)
    mesh = make_mesh({"batch": device_count()}, AxisType.Auto)
    params, tokens = start(config, mlm=False), batch(config, 2)["tokens"]

    def run(params, tokens):
        index = jax.lax.axis_index("batch")
        options = dict(key=jax.random.fold_in(KEY, index))
        if what == "mask":
            options = dict(mask=jnp.arange(SEQUENCE) + 0 * tokens <= index)
        return hidden_of(params, {"tokens": tokens}, config, ops=bert.PLAIN, **options)[None]

    found = jax.eval_shape(
        jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("batch")), params, tokens
    )
    assert found.shape == (device_count(), 2, SEQUENCE, 32)


NETWORKS = {
    "softmax": {},
    "dropout": dict(dropout=0.2, attention_dropout=0.3),
    "xla": dict(attention="xla"),
    "scan-remat": dict(scan=True, remat=True),
}


def reshaped(params: dict, like: dict) -> dict:
    return jax.tree.map(lambda a, struct: np.reshape(np.asarray(a), struct.shape), params, like)


@over_meshes(NETWORKS, ("tensor", "sequence", "all"))
def test_mesh(native, over, kind, name):
    """Only the communication that the layout implies, with shardings only: see the guide."""
    if device_count() < 8:
        pytest.skip("needs eight devices")
    sizes, count, length = MESHES[over], CONFIG.layers, 64
    tensor, sequence = "tensor" in sizes, "sequence" in sizes
    plain = dataclasses.replace(CONFIG, vocab_size=48, positions=length, **NETWORKS[name])
    config = dataclasses.replace(plain, tensor_parallel=tensor)
    whole = start(plain)
    params = reshaped(whole, bert.shapes(config, mlm=True))
    if config.scan:
        params, whole, count = bert.stack_layers(params), bert.stack_layers(whole), 1
    specs = bert.partition_specs(config, mlm=True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 48, (8, length))
    labels = rng.integers(-20, 48, (8, length))
    mask = np.arange(length) < rng.integers(1, length, (8, 1))
    key = KEY if config.dropout else None

    def total(params, tokens, labels, mask, config):
        hidden, pooled = bert.apply(params, tokens, config, mask=mask, key=key)
        loss = bert.masked_lm_loss(params, hidden, labels, config)
        return loss + jnp.mean(pooled * np.arange(32)), hidden

    def run(config, **options):
        both = jax.value_and_grad(functools.partial(total, config=config), has_aux=True)
        return jax.jit(both, **options)

    mesh = make_mesh(sizes, KINDS[kind])
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    dealt = P("data", "sequence" if sequence else None)
    given = jax.tree.map(place, params, specs), *(place(a, dealt) for a in (tokens, labels, mask))
    with jax.set_mesh(mesh):
        forward = jax.jit(lambda *args: total(*args, config)[1]).lower(*given).compile()
        shardings = None, jax.tree.map(lambda a: a.sharding, given[0])
        both = run(config, out_shardings=shardings).lower(*given).compile()
        (value, hidden), grads = both(*given)
    assert hidden.sharding.is_equivalent_to(NamedSharding(mesh, dealt), 3)

    # The rows of the embeddings, and the outputs of attention and feed-forward. The mask, and keys
    # and values.
    wanted = {"all-reduce": tensor * (1 + 2 * count), "all-gather": sequence * (1 + 2 * count)}
    assert collectives(forward.as_text()) == {kind: n for kind, n in wanted.items() if n}
    counts = collectives(both.as_text())
    # Again with remat. The gradient of the table of positions, which is not sharded.
    gathers = 2 + 2 * count * (1 + config.remat)
    assert counts.pop("all-gather", 0) == sequence * gathers
    # The first token, for the pooler, and its gradient.
    assert counts.pop("collective-permute", 0) <= sequence
    # In a layer two sums forward and two backward for tensor, and that of the gradients of keys and
    # values for sequence. Outside, tensor has four.
    sums = (4 * tensor + sequence) * count + 4 * tensor
    # The loss and the gradients of parameters are summed over each axis of the tokens. XLA combines
    # the gradients of parameters that are sharded alike, inside and outside of the scan.
    combined = (1 + (tensor and sequence)) * (1 + config.scan)
    assert counts.pop("all-reduce") <= sums + (1 + sequence) * (1 + combined)
    assert not counts
    (value_, hidden_), grads_ = run(plain)(whole, tokens, labels, mask)
    found = value, hidden, reshaped(grads, grads_)
    assert_close_in_norm(found, (value_, hidden_, grads_), 2e-5)


# ---- errors --------------------------------------------------------------------------------------


def test_config_is_static():
    """Configs with equal values are equal and have one hash, whatever types were given."""
    config = dataclasses.replace(
        CONFIG,
        layers=np.int64(2),
        dtype=jnp.float32,
        dropout=0,
        eps=np.float64(1e-12),
        remat=np.bool_(False),
    )
    assert config == CONFIG and hash(config) == hash(CONFIG)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(layers=0), ValueError, "layers is 0; it must be 1 or more"),
        (dict(hidden_size=32.0), TypeError, "hidden_size is 32.0; it must be an integer"),
        (dict(heads=5), ValueError, "heads is 5, which does not divide hidden_size, 32"),
        (dict(activation="tanh"), ValueError, "activation is 'tanh'; it must be one of 'gelu', "),
        (dict(attention="flash"), ValueError, "attention is 'flash'; it must be one of 'softmax'"),
        (dict(dtype="int32"), ValueError, "dtype is 'int32'; it must be one of 'float32', "),
        (dict(dropout=1.0), ValueError, "dropout is 1.0; it must be from 0 to less than 1"),
        (dict(attention_dropout="0"), TypeError, "attention_dropout is of type str; it must be"),
        (dict(eps=-1.0), ValueError, "eps is -1.0; it must be 0 or more, and finite"),
        (dict(eps=math.inf), ValueError, "eps is inf; it must be 0 or more, and finite"),
        (dict(init_range=math.nan), ValueError, "init_range is nan; it must be 0 or more"),
        (dict(dtype=None), TypeError, "dtype is None; it must be a dtype or the name of one"),
        (dict(dtype=3), TypeError, "dtype is 3; it must be a dtype or the name of one"),
        (dict(remat="dots"), TypeError, "remat is 'dots'; it must be True or False"),
        (dict(scan=2), TypeError, "scan is 2; it must be True or False"),
    ],
)
def test_config_errors(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "labels, error, message",
    [
        (0, ValueError, "labels is 0; it must be 1 or more"),
        (2.0, TypeError, "labels is 2.0; it must be an integer"),
    ],
)
def test_errors_of_labels(labels, error, message):
    with pytest.raises(error, match=message):
        bert.shapes(CONFIG, labels=labels)
    with pytest.raises(error, match=message):
        bert.init(KEY, CONFIG, labels=labels)


TOKENS = np.zeros((2, 5), np.int32)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(config={}), TypeError, "config is of type dict; it must be a Config"),
        (dict(ops=fo), TypeError, "ops is of type module; it must be an Ops, such as FASTOPS or"),
        (dict(params=[]), TypeError, "params is of type list; it must be a dict"),
        (dict(tokens=[[1]]), TypeError, "tokens is of list; it must be an array of integers"),
        (dict(tokens=TOKENS + 0.5), TypeError, "tokens is of float64; it must be an array of int"),
        (dict(tokens=TOKENS > 0), TypeError, "tokens is of bool; it must be an array of integers"),
        (dict(tokens=TOKENS[0]), ValueError, r"tokens has shape \(5,\); it must be \(batch, sequ"),
        (dict(tokens=TOKENS[:, :0]), ValueError, r"tokens has shape \(2, 0\); .* one token or"),
        (
            dict(tokens=np.zeros((1, 17), int)),
            ValueError,
            r"tokens has shape \(1, 17\), but config has 16 positions",
        ),
        (dict(mask=TOKENS[:, :4]), ValueError, r"mask has shape \(2, 4\); it must be \(2, 5\), as"),
        (dict(mask=TOKENS + 1.0), TypeError, "mask is of float64; it must be an array of booleans"),
        (dict(token_types=TOKENS[0]), ValueError, r"token_types has shape \(5,\); it must be \(2,"),
        (
            dict(positions=TOKENS[:1]),
            ValueError,
            r"positions has shape \(1, 5\); it must be \(5,\)",
        ),
        (dict(key=3), TypeError, r"key is int; it must be a random key, such as jax\.random\.key"),
        (
            dict(key=jax.random.split(jax.random.key(0))),
            ValueError,
            r"key has shape \(2,\); it must be one random key",
        ),
        (
            dict(
                key=jax.random.key(0),
                config=dataclasses.replace(CONFIG, attention="xla", attention_dropout=0.1),
            ),
            ValueError,
            "attention_dropout is 0.1, but attention='xla' has no dropout of probabilities",
        ),
        (
            dict(config=dataclasses.replace(CONFIG, layers=3)),
            ValueError,
            r"params has no \['layers'\]\[2\]\['down'\]\['bias'\], which config has, of shape \(32",
        ),
        (
            dict(config=dataclasses.replace(CONFIG, layers=1)),
            ValueError,
            r"params has \['layers'\]\[1\]\['down'\]\['bias'\], which config has not",
        ),
        (
            dict(
                params=bert.stack_layers(start(CONFIG)),
                config=dataclasses.replace(CONFIG, layers=3),
            ),
            ValueError,
            r"params\['layers'\]\['down'\]\['bias'\] has shape \(2, 32\); by config it must be ",
        ),
        *(
            (dict(params=start(CONFIG) | head), ValueError, message)
            for head, message in [
                ({"classifier": {}}, r"params has no \['classifier'\]\['bias'\], which"),
                ({"classifier": {"kernel": np.zeros((32, 3))}}, r"\['bias'\], .* of shape \(3,\)"),
                ({"classifier": np.zeros(3)}, r"params has no \['classifier'\]\['bias'\], which"),
                (
                    {"classifier": {"bias": np.zeros(3), "kernel": np.zeros((32, 2))}},
                    r"params\['classifier'\]\['kernel'\] has shape \(32, 2\); by .* \(32, 3\)",
                ),
                ({"qa": {"bias": np.zeros(2)}}, r"params has no \['qa'\]\['kernel'\], which"),
            ]
        ),
    ],
)
def test_errors(changes, error, message):
    given = dict(params=start(CONFIG), tokens=TOKENS, config=CONFIG) | changes
    with pytest.raises(error, match=message):
        bert.apply(**given)


# The arguments of the encoder except its parameters.
LAYER_ERRORS = [
    (dict(config={}), TypeError, "config is of type dict; it must be a Config"),
    (dict(ops=fo), TypeError, "ops is of type module; it must be an Ops, such as FASTOPS or"),
    (dict(x=np.zeros((2, 5, 32), jnp.bfloat16)), TypeError, "x is of bfloat16; .* float32"),
    (dict(x=[[0.0]]), TypeError, "x is of list; it must be an array of the dtype of config"),
    (dict(x=np.zeros((2, 32), np.float32)), ValueError, r"x has shape \(2, 32\); it must be"),
    (dict(x=np.zeros((2, 5, 31), np.float32)), ValueError, r"\(batch, sequence, 32\)"),
    (dict(mask=TOKENS + 0.0), TypeError, "mask is of float64; it must be an array of booleans"),
    (dict(mask=TOKENS[:1] > 0), ValueError, r"mask has shape \(1, 5\); it must be \(2, 5\), as x"),
    (dict(key=3), TypeError, "key is int; it must be a random key"),
    (
        dict(config=dataclasses.replace(CONFIG, attention="xla", attention_dropout=0.1), key=KEY),
        ValueError,
        "attention_dropout is 0.1, but attention='xla' has no dropout of probabilities",
    ),
]


@pytest.mark.parametrize(
    "changes, error, message",
    [
        *LAYER_ERRORS,
        (dict(params=start(CONFIG)), ValueError, r"params has no \['down'\]\['bias'\], which"),
    ],
)
def test_errors_of_layer(changes, error, message):
    """A mask of floats is refused: other libraries add such a mask to the scores."""
    x = np.zeros((2, 5, 32), np.float32)
    given = dict(params=start(CONFIG)["layers"][0], x=x, config=CONFIG) | changes
    with pytest.raises(error, match=message):
        bert.encoder_layer(**given)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        *LAYER_ERRORS,
        (dict(layers=None), TypeError, "layers is of type NoneType; it must be a list, or a dict"),
        (dict(layers=start(CONFIG)), ValueError, r"layers has no \['down'\]\['bias'\], which"),
        (
            dict(
                layers=bert.stack_layers(start(CONFIG))["layers"],
                config=dataclasses.replace(CONFIG, layers=3),
            ),
            ValueError,
            r"layers\['down'\]\['bias'\] has shape \(2, 32\); by config it must be \(3, 32\)",
        ),
        (dict(layers=start(CONFIG)["layers"][:1]), ValueError, r"layers has no \[1\]\['down'\]\["),
        (dict(config=bert.SMALL), ValueError, r"layers\[0\]\['down'\]\['bias'\] has shape \(32,\)"),
        (dict(config=3), TypeError, "config is of type int; it must be a Config"),
    ],
)
def test_errors_of_encoder(changes, error, message):
    x = np.zeros((2, 5, 32), np.float32)
    given = dict(layers=start(CONFIG)["layers"], x=x, config=CONFIG) | changes
    with pytest.raises(error, match=message):
        bert.encoder(**given)


def test_errors_of_logits():
    params = start(CONFIG)
    hidden = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"params has no \['mlm'\]; make it with init"):
        bert.masked_lm_logits(start(CONFIG, mlm=False), hidden, CONFIG)
    with pytest.raises(TypeError, match="hidden is of int32; it must be an array of a floating"):
        bert.masked_lm_logits(params, hidden.astype(np.int32), CONFIG)
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 31\); its last axis must be hid"):
        bert.masked_lm_logits(params, hidden[:, :31], CONFIG)
