"""`autofuse`: a product, its bias and its activation as one call, in forwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.programs import cuda_targets_of
from test_autofuse import close, names

import jax_fastops as fo
from jax_fastops import _dispatch, _native
from jax_fastops.autofuse import _decisions, _tune
from jax_fastops.autofuse._tune import Times

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, K, N = 96, 16, 24
gelu, exact = jax.nn.gelu, functools.partial(jax.nn.gelu, approximate=False)


@pytest.fixture(autouse=True)
def cuda(cuda_programs, monkeypatch):
    for module in (_decisions, _tune):
        monkeypatch.setattr(module, "lowering_platform", lambda: "cuda")
    monkeypatch.setattr(_tune, "why_not", lambda: "")  # which is that of one device
    entries = _dispatch.trees("cuda")
    for name in ("dense_gelu", "dense_gelu_exact", "dense_silu"):  # also for small arrays
        monkeypatch.setitem(entries[name]["bfloat16"], "forward", ["row_count", 96, False, True])
    _decisions.clear()


@pytest.fixture
def without_kernel(monkeypatch):
    """A function that leaves the kernel out, as before there was one."""
    own = _native.kernels

    def leave():
        monkeypatch.setattr(_native, "kernels", lambda p: own(p) - {"jax_fastops.dense_act"})

    return leave


def arrays(*shapes, dtype=BF16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


X, W, B = arrays((2, ROWS // 2, K), (K, N), (N,))
W *= 0.2


def by_erf(x):
    return x * 0.5 * (1 + jax.lax.erf(x.astype(F32) * 0.5**0.5).astype(x.dtype))


# Functions of an array [2, 48, 16], a kernel [16, 24] and a bias [24], and what the call is.
FORMS = {
    "@": (lambda x, w, b: gelu(x @ w + b), "bias + gelu"),
    "dot": (lambda x, w, b: exact(b + jnp.dot(x, w)), "bias + gelu_exact"),
    "einsum": (
        lambda x, w, b: exact(jnp.einsum("...i,io->...o", x, w) + b),
        "bias + gelu_exact",
    ),
    "by hand": (lambda x, w, b: by_erf(x @ w + b), "bias + gelu_exact"),
    "silu": (lambda x, w, b: jax.nn.silu(x @ w), "silu"),
    "no bias": (lambda x, w, b: gelu(x @ w), "gelu"),
    "quick gelu": (
        lambda x, w, b: (h := x @ w + b) * jax.nn.sigmoid(1.702 * h),
        "bias + quick_gelu",
    ),
    "rows": (
        lambda x, w, b: gelu((x.reshape(-1, K) @ w).reshape(2, -1, N) + b),
        "bias + gelu",
    ),
    "wide bias": (lambda x, w, b: gelu(x @ w + b.astype(F32).astype(BF16)), "bias + gelu"),
    "cast": (lambda x, w, b: gelu(x @ w.astype(F32).astype(BF16) + b), "bias + gelu"),
    "jit": (lambda x, w, b: jax.jit(lambda h: gelu(h + b))(jax.jit(jnp.dot)(x, w)), "bias + gelu"),
    "precision": (lambda x, w, b: gelu(jnp.dot(x, w, precision="highest") + b), "bias + gelu"),
    "before a product": (lambda x, w, b: gelu(x @ w + b) @ w.T, "bias + gelu"),
    "reshaped": (lambda x, w, b: gelu(x @ w + b).reshape(-1, N) @ w.T, "bias + gelu"),
    "scan": (
        lambda x, w, b: jax.lax.scan(lambda c, _: (gelu(c @ w + b) @ w.T, None), x, length=2)[0],
        "bias + gelu",
    ),
    "vmap": (lambda x, w, b: jax.vmap(lambda x: gelu(x @ w + b))(x), "bias + gelu"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name, without_kernel):
    f, call = FORMS[name]
    assert names(f, X, W, B) == ["product + " + call]
    fused = fo.autofuse(f)
    assert cuda_targets_of(fused, X, W, B).count("dense_act") == 1
    close(jax.jit(fused)(X, W, B), f(X, W, B), 0.03)
    gradient = steps(fused)
    step = str(jax.make_jaxpr(gradient)(X, W, B))
    close(jax.jit(gradient)(X, W, B), steps(f)(X, W, B), 0.03)
    without_kernel()
    assert "dense_act" not in step and step == str(jax.make_jaxpr(steps(fo.autofuse(f)))(X, W, B))


def steps(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args).astype(F32))), (0, 1, 2))


# What stays, with what autofuse takes in it.
LEFT = {
    "relu, which XLA adds to the product": lambda x, w, b: jax.nn.relu(x @ w + b),
    "float32": lambda x, w, b: gelu(x.astype(F32) @ w.astype(F32) + b.astype(F32)),
    "wide product": lambda x, w, b: gelu(
        jnp.dot(x, w, preferred_element_type=F32) + b.astype(F32)
    ).astype(BF16),
    "a wide sum": lambda x, w, b: gelu((x @ w).astype(F32) + b.astype(F32)).astype(BF16),
    "a stored transposition": lambda x, w, b: gelu(x @ w.reshape(N, K).T + b),
    "a contraction with the last axis": lambda x, w, b: gelu(
        jnp.einsum("...i,oi->...o", x, w.reshape(N, K)) + b
    ),
    "batches": lambda x, w, b: gelu(jnp.einsum("bti,bio->bto", x, jnp.stack([w, w])) + b),
    "heads": lambda x, w, b: gelu(jnp.einsum("bti,iho->btho", x, w.reshape(K, 2, N // 2))),
    "the product is used": lambda x, w, b: (gelu((y := x @ w) + b), y),
    "the sum is used": lambda x, w, b: (gelu(y := x @ w + b), y),
    "a factor": lambda x, w, b: gelu(2 * (x @ w) + b),
    "another activation": lambda x, w, b: gelu(jnp.tanh(x @ w) + b),
    "a bias of rows": lambda x, w, b: gelu(x @ w + x[:, :, :1]),
    "few rows": lambda x, w, b: gelu(x[0, :47] @ w + b),
    "odd columns": lambda x, w, b: gelu(x @ w[:, :23] + b[:23]),
    "a fused sum": lambda x, w, b: gelu(x @ w + b) + b,
    "a reduction": lambda x, w, b: gelu(x @ w + b).mean(1),
    "a cast": lambda x, w, b: gelu(x @ w + b).astype(F32),
    "a gate": lambda x, w, b: gelu(x @ w) * (x @ (w + 1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name, without_kernel):
    f = LEFT[name]
    found = fo.autofuse.report(f)(X, W, B)
    assert not any("product" in r.pattern for r in found.replaced)
    program = str(jax.make_jaxpr(fo.autofuse(f))(X, W, B))
    without_kernel()
    assert program == str(jax.make_jaxpr(fo.autofuse(f))(X, W, B))


# ---- what takes the call -------------------------------------------------------------------------


def mapped(f, axes, *args):
    fused = jax.vmap(fo.autofuse(f), axes)
    close(jax.jit(fused)(*args), jax.vmap(f, axes)(*args), 0.03)
    return cuda_targets_of(fused, *args).count("dense_act")


def test_mapped_calls():
    f = FORMS["@"][0]
    x, w = jnp.stack([X] * 3), jnp.stack([W] * 3)
    assert mapped(f, (0, None, None), x, W, B) == 1
    assert mapped(f, (0, 0, None), x, w, B) == 0
    gradient = jax.vmap(steps(fo.autofuse(f)), (0, None, None))
    close(gradient(x, W, B), jax.vmap(steps(f), (0, None, None))(x, W, B), 0.03)


def test_derivatives_of_a_forward_that_is_traced_before():
    """Of one operand, of all, in forward mode, through `jit` and `remat`."""
    f = FORMS["dot"][0]
    fused = jax.jit(fo.autofuse(f))
    for g in (fused, jax.checkpoint(fused)):
        assert "dense_act" not in cuda_targets_of(steps(g), X, W, B)
        close(steps(g)(X, W, B), steps(f)(X, W, B), 0.03)
    tangents = [jax.jvp(lambda w, g=g: g(X, w, B), (W,), (W,))[1] for g in (f, fused)]
    close(*tangents, 0.03)
    hessians = [jax.jvp(lambda w, g=g: steps(g)(X, w, B), (W,), (W,))[1] for g in (f, fused)]
    close(*hessians, 0.06)


def test_large_activations_keep_their_step(without_kernel):
    """The kernel of `bias_act` in a step, which its region decides, and the report."""
    f, args = (
        FORMS["dot"][0],
        [jax.ShapeDtypeStruct(s, BF16) for s in ((8192, 512), (512, 2048), (2048,))],
    )
    (found,) = fo.autofuse.report(f)(*args).replaced
    assert found.pattern == "product + bias + gelu_exact" and "8,192 rows" in found.why
    gradient = steps(fo.autofuse(f))
    assert [c.op for c in fo.explain(fo.autofuse(f))(*args).calls] == ["dense_act"]
    assert [c.op for c in fo.explain(gradient)(*args).calls] == ["bias_act"]
    step, targets = str(jax.make_jaxpr(gradient)(*args)), cuda_targets_of(gradient, *args)
    assert sorted(targets) == ["bias_act", "bias_act_bwd"]
    without_kernel()
    assert step == str(jax.make_jaxpr(steps(fo.autofuse(f)))(*args))


@pytest.mark.parametrize("taken", [True, False, None])
def test_measured_times_decide(taken, monkeypatch, tmp_path, without_kernel):
    monkeypatch.setenv("JAX_FASTOPS_CACHE", str(tmp_path))
    times, timed = Times(1.0, {True: 0.9, False: 1.1, None: 1.01}[taken]), []
    own = _tune.measure

    def measure(regions, program):
        timed.extend(map(str, regions))
        assert all(list(found) == ["forward"] for found in own(regions, program))
        return [{"forward": times} for _ in regions]

    monkeypatch.setattr(_tune, "measure", measure)
    fused = fo.autofuse(lambda x, w, b: exact(exact(x @ w + b) @ w.T @ w + b), tune=True)
    for _ in range(2):  # measured, then from the cache
        assert cuda_targets_of(fused, X, W, B).count("dense_act") == (0 if taken is False else 2)
        assert timed == ["product + bias + gelu_exact"]  # both layers are equal
        _decisions.clear()
    report = fo.autofuse.report(fused)(X, W, B)
    text = [r.why for r in report.replaced] or [m.reason for m in report.missed]
    assert (": forward " in text[0]) is (taken is not None)


def test_layers_of_libraries():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    dense = linen.Dense(N, dtype=BF16, param_dtype=F32)
    params = dense.init(jax.random.key(0), X)
    layer = nnx.Linear(K, N, dtype=BF16, param_dtype=F32, rngs=nnx.Rngs(0))
    found = names(lambda p, x: linen.gelu(dense.apply(p, x)), params, X)
    found += names(lambda layer, x: nnx.gelu(layer(x)), layer, X)
    assert found == ["product + bias + gelu"] * 2


def test_layers_of_haiku_and_equinox():
    haiku, equinox = pytest.importorskip("haiku"), pytest.importorskip("equinox")
    model = haiku.without_apply_rng(haiku.transform(lambda x: gelu(haiku.Linear(N)(x))))
    assert names(model.apply, model.init(jax.random.key(0), X), X) == ["product + bias + gelu"]
    linear = equinox.nn.Linear(K, N, dtype=BF16, key=jax.random.key(0))  # weights [out, in]
    rows = X.reshape(-1, K)

    def f(w, b, x):
        return gelu(jax.vmap(lambda row: w @ row + b)(x))

    assert not any("product" in name for name in names(f, linear.weight, linear.bias, rows))


# ---- random programs -----------------------------------------------------------------------------


BETWEEN = {
    "same": lambda h: h,
    "rows": lambda h: h.reshape(-1, h.shape[-1]),
    "turned": lambda h: jnp.swapaxes(h, 0, 1),
    "wide": lambda h: h.astype(F32).astype(BF16),
    "scaled": lambda h: h * BF16(0.5),
    "negated": lambda h: -h,
    "tanh": jnp.tanh,
    "row": lambda h: h * h[..., :1],
    "mirrored": lambda h: h[..., ::-1],
    "doubled": lambda h: jnp.concatenate([h, h], 0),
}


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed):
    """Values are equal, whatever is between a product, its bias, the activation and a result."""
    rng, taken = np.random.default_rng(seed), 0
    for _ in range(12):
        picked = [BETWEEN[n] for n in rng.choice(list(BETWEEN), 3, p=[0.4] + [0.6 / 9] * 9)]
        act = (gelu, exact, jax.nn.silu, by_erf)[rng.integers(4)]
        twice, bias = rng.random() < 0.2, rng.random() < 0.7

        def f(x, w, b, picked=picked, act=act, twice=twice, bias=bias):
            product = x @ w
            h = picked[0](product)
            h = picked[1](h + b if bias else h)
            y = picked[2](act(h))
            return (y, product) if twice else y

        fused = fo.autofuse(f)
        close(jax.jit(fused)(X, W, B), f(X, W, B), 0.03)
        taken += cuda_targets_of(fused, X, W, B).count("dense_act")
    assert 0 < taken < 12
