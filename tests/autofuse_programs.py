"""Programs that compute what our ops do, as people and libraries write them."""

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 6, 40)), jnp.float32)
Y = jnp.asarray(RNG.standard_normal((4, 6, 40)), jnp.float32)
B = jnp.asarray(RNG.standard_normal(40), jnp.float32)
C = jnp.asarray(RNG.standard_normal(40), jnp.float32)
MASK = X > -0.5
SCORES = jnp.asarray(RNG.standard_normal((2, 3, 8, 8)), jnp.float32)
LOWER = jnp.tril(jnp.ones((8, 8), bool))
LABELS = jnp.asarray(RNG.integers(0, 40, (4, 6)))
IMAGES = jnp.asarray(RNG.standard_normal((2, 5, 5, 8)), jnp.float32)


def mean_of(x):
    return jnp.mean(x, -1, keepdims=True)


def by_moments(x, scale, bias):
    mean = mean_of(x)
    var = mean_of((x - mean) ** 2)
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


def by_var(x, scale, bias):
    return scale * ((x - mean_of(x)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)) + bias


def by_inverse(x, scale, bias):
    inverse = scale * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3)
    return inverse * (x - mean_of(x)) + bias


def by_squares(x, scale, bias):
    mean = jnp.mean(x, -1)
    var = jnp.maximum(0, jnp.mean(jnp.square(x), -1) - jnp.square(mean))
    return (x - mean[..., None]) * (jax.lax.rsqrt(var[..., None] + 1e-6) * scale) + bias


def multiplied_out(x, scale, bias):
    mean, var = mean_of(x), jnp.var(x, -1, keepdims=True)
    inverse = jax.lax.rsqrt(var + 1e-5) * scale
    return x * inverse + (bias - mean * inverse)


def rms(x, scale):
    return x * jax.lax.rsqrt(mean_of(x**2) + 1e-6) * scale


def rms_of_full_mean(x, scale):
    return (x * scale) * jax.lax.rsqrt(jnp.broadcast_to(mean_of(x**2), x.shape) + 1e-5)


def gemma_rms(x, scale):
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(mean_of(jnp.square(h)) + 1e-6)
    return (h * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def rms_by_einsum(x, scale):
    square = jnp.einsum("...d,...d->...", x, x, preferred_element_type=jnp.float32)
    return x * jax.lax.rsqrt(square[..., None] / x.shape[-1] + 1e-6) * scale


def norm_by_vdot(x, scale, bias):
    centered = x - x.mean()
    return centered * jax.lax.rsqrt(jnp.vdot(centered, centered) / x.size + 1e-5) * scale + bias


def batch_norm(x, scale, bias):
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias, mean, var


def folded_batch_norm(x, scale, bias):
    """As in Keras."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    inverse = jax.lax.rsqrt(var + 1e-3) * scale
    return x * inverse + (bias - mean * inverse)


def group_norm(x, scale, bias, groups=2):
    """With channels last, as in the U-Nets of diffusion models."""
    h = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, var = h.mean((1, 3), keepdims=True), h.var((1, 3), keepdims=True)
    h = ((h - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
    return (h * scale + bias).astype(x.dtype)


def group_norm_first(x, scale, bias, groups=2):
    """With channels first, as in ports of PyTorch."""
    h = x.reshape(x.shape[0], groups, -1)
    mean, square = (jnp.mean(v, 2, keepdims=True) for v in (h, h * h))
    h = (h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)
    return h.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]


def instance_norm(x, scale, bias):
    mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    return scale * ((x - mean) * jax.lax.rsqrt(var + 1e-5)) + bias


def softmax(x, axis=-1):
    e = jnp.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def tanh_gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def label_loss(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]


def one_hot_loss(x, labels):
    return -jnp.sum(jax.nn.one_hot(labels, x.shape[-1]) * jax.nn.log_softmax(x), -1)


def einsum_loss(x, labels):
    return -jnp.einsum("...v,...v", jax.nn.one_hot(labels, x.shape[-1]), jax.nn.log_softmax(x))


def shifted_loss(x, labels):
    x = x - jax.lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.log(jnp.exp(x).sum(-1)) - jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def shifted_loss_by_index(x, labels):
    """With a derivative of the maximum, which is 0."""
    x = x - x.max(-1, keepdims=True)
    return jnp.log(jnp.exp(x).sum(-1)) - x[jnp.arange(4)[:, None], jnp.arange(6), labels]


def shifted_loss_by_sum(x, labels):
    x = x - x.max(-1, keepdims=True)
    return jnp.log(jnp.exp(x).sum(-1)) - (x * jax.nn.one_hot(labels, x.shape[-1])).sum(-1)


W = jnp.asarray(RNG.standard_normal((50, 40)) / 6, jnp.float32)
BIAS = jnp.asarray(RNG.standard_normal(50), jnp.float32)


def masked_sum_loss(x, labels):
    at_label = jnp.arange(x.shape[-1]) == labels[..., None]
    return jax.nn.logsumexp(x, -1) - jnp.sum(jnp.where(at_label, x, 0), -1)


def z_loss(x, labels, z=0.01):
    log_sum = jax.nn.logsumexp(x, -1)
    return log_sum - jnp.take_along_axis(x, labels[..., None], -1)[..., 0] + z * log_sum**2


def smoothed_loss(x, labels, share=0.1):
    x = jax.nn.log_softmax(x)
    losses = -jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return (1 - share) * losses - share * x.mean(-1)


def smoothed_z_loss(x, labels, share=0.1, z=0.01):
    log_sum = jax.nn.logsumexp(x, -1)
    losses = (1 - share) * masked_sum_loss(x, labels) + share * (log_sum - x.mean(-1))
    return losses + z * jnp.square(log_sum)


def capped(x):
    return 2.0 * jnp.tanh(x / 2.0)


def wide_product(x, table):
    """Of a bfloat16 array and a float32 table, as on a GPU."""
    table = table.astype(x.dtype)
    return jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)


# Name: the function, its operands, and the patterns that are replaced.
PROGRAMS = {
    "relu": (jax.nn.relu, (X,), ["relu"]),
    "relu under vmap": (jax.vmap(jax.vmap(jax.nn.relu)), (X,), ["relu"]),
    "add + relu": (lambda x, y: jax.nn.relu(x + y), (X, Y), ["add + relu"]),
    "bias + relu": (lambda x, b: jax.nn.relu(x + b), (X, B), ["bias + relu"]),
    "gelu": (jax.nn.gelu, (X,), ["gelu"]),
    "bias + gelu": (lambda x, b: jax.nn.gelu(b + x), (X, B), ["bias + gelu"]),
    "tanh gelu": (tanh_gelu, (X,), ["gelu"]),
    "gelu of products": (
        lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x))),
        (X,),
        ["gelu"],
    ),
    "gelu factored": (
        lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
        (X,),
        ["gelu"],
    ),
    "gelu by sigmoid": (
        lambda x: x * jax.nn.sigmoid(1.5957691216 * (x + 0.044715 * x**3)),
        (X,),
        ["gelu"],
    ),
    "gelu by the normal distribution": (
        lambda x: x * jax.scipy.stats.norm.cdf(x),
        (X,),
        ["gelu_exact"],
    ),
    "silu by tanh": (lambda x: x * (0.5 + 0.5 * jnp.tanh(x / 2)), (X,), ["silu"]),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), (X,), ["gelu_exact"]),
    "erf": (lambda x: x * (1 + jax.lax.erf(x / 2**0.5)) / 2, (X,), ["gelu_exact"]),
    "silu": (jax.nn.silu, (X,), ["silu"]),
    "sigmoid": (lambda x: jax.nn.sigmoid(x) * x, (X,), ["silu"]),
    "swiglu": (lambda x, y: jax.nn.silu(x) * y, (X, Y), ["silu * up"]),
    "geglu": (lambda x, y: y * jax.nn.gelu(x), (X, Y), ["gelu * up"]),
    "reglu": (lambda x, y: y * jax.nn.relu(x), (X, Y), ["relu * up"]),
    "swiglu of halves": (
        lambda x: (lambda gate, up: jax.nn.silu(gate) * up)(*jnp.split(x, 2, -1)),
        (X,),
        ["split + silu * up"],
    ),
    "geglu of slices": (
        lambda x: x[..., 20:] * jax.nn.gelu(x[..., :20]),
        (X,),
        ["split + gelu * up"],
    ),
    "softmax": (jax.nn.softmax, (X,), ["softmax"]),
    "softmax of axis 0": (lambda x: jax.nn.softmax(x, 0), (X,), ["softmax"]),
    "softmax by hand": (softmax, (X,), ["softmax"]),
    "softmax of a middle axis": (lambda x: softmax(x, 1), (X,), ["softmax"]),
    "softmax by logsumexp": (
        lambda x: jnp.exp(x / 4 - jax.nn.logsumexp(x / 4, 1, keepdims=True)),
        (X,),
        ["scale + softmax"],
    ),
    "softmax under vmap": (jax.vmap(softmax, 1), (X,), ["softmax"]),
    "softmax under vmap, moved back": (jax.vmap(jax.nn.softmax, 2, 2), (X,), ["softmax"]),
    "log_softmax under vmap": (
        jax.vmap(lambda x: jax.nn.log_softmax(x, 0), 1, 1),
        (X,),
        ["log_softmax"],
    ),
    "mask under vmap": (
        jax.vmap(lambda x, m: jax.nn.softmax(x / 8, where=m), (1, 2), 1),
        (X, MASK.transpose(0, 2, 1)),
        ["scale + softmax with where"],
    ),
    "causal under vmap": (
        jax.vmap(lambda x: softmax(jnp.where(LOWER, x, -jnp.inf)), 1, 1),
        (SCORES,),
        ["where + softmax"],
    ),
    "layer norm under vmap": (
        jax.vmap(lambda x: by_moments(x, B[:6], C[:6]), 2, 2),
        (X,),
        ["layer_norm"],
    ),
    "norm of what a function moves": (
        lambda x, b: rms(jax.jit(lambda x: jnp.sin(x).swapaxes(0, 1))(x), b),
        (X, B),
        ["rms_norm"],
    ),
    "scaled softmax": (lambda x: jax.nn.softmax(x * 0.125), (X,), ["scale + softmax"]),
    "masked softmax": (
        lambda x, where: jax.nn.softmax(x, where=where),
        (X, MASK),
        ["softmax with where"],
    ),
    "broadcast mask": (
        lambda x, where: jax.nn.softmax(x, where=where),
        (X, MASK[:, :1]),
        ["softmax with where"],
    ),
    "causal": (
        lambda x: softmax(jnp.where(jnp.tril(jnp.ones((8, 8))) == 0, -jnp.inf, x)),
        (SCORES,),
        ["where + softmax"],
    ),
    "causal, by numbers": (
        lambda x: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((1, 1, 8, 8))), x / 8, -1e30)),
        (SCORES,),
        ["scale + where + softmax"],
    ),
    "scaled causal": (
        lambda x: jax.nn.softmax(jnp.where(jnp.arange(8)[:, None] >= jnp.arange(8), x / 8, -1e9)),
        (SCORES,),
        ["scale + where + softmax"],
    ),
    "added causal": (
        lambda x: jax.nn.softmax(x * 0.5 + (1 - LOWER.astype(x.dtype)) * -1e10),
        (SCORES,),
        ["scale + where + softmax"],
    ),
    "causal attention": (
        lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True),
        (SCORES.transpose(0, 2, 1, 3),),
        ["attention"],
    ),
    "mask of the data": (
        lambda x, where: jax.nn.softmax(jnp.where(where, x, -1e9)),
        (X, MASK.at[0].set(False)),
        ["softmax"],
    ),
    "added mask": (
        lambda x, where: jax.nn.softmax(x + jnp.where(where, 0, jnp.finfo(x.dtype).min)),
        (X, MASK.at[0].set(False)),
        ["softmax"],
    ),
    "log_softmax": (jax.nn.log_softmax, (X,), ["log_softmax"]),
    "logsumexp": (
        lambda x: x - jax.scipy.special.logsumexp(x, -1, keepdims=True),
        (X,),
        ["log_softmax"],
    ),
    "loss": (label_loss, (X, LABELS), ["cross_entropy"]),
    "one-hot loss": (one_hot_loss, (X, LABELS), ["cross_entropy of one_hot"]),
    "loss by indices": (
        lambda x, labels: -jax.nn.log_softmax(x)[jnp.arange(4)[:, None], jnp.arange(6), labels],
        (X, LABELS),
        ["cross_entropy"],
    ),
    "loss by indices under vmap": (
        jax.vmap(lambda x, labels: jax.nn.logsumexp(x, -1) - x[jnp.arange(6), labels]),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "shifted": (shifted_loss, (X, LABELS), ["cross_entropy"]),
    "shifted, by indices": (shifted_loss_by_index, (X, LABELS), ["cross_entropy"]),
    "shifted, by a sum": (
        lambda x, labels: -shifted_loss_by_sum(x, labels),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "shifted under vmap": (
        jax.vmap(jax.vmap(lambda x, i: jnp.log(jnp.exp(x - x.max()).sum()) - (x - x.max())[i])),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "contrastive loss": (
        lambda x, y: (
            label_loss(x @ y.T, jnp.arange(6))
            - jax.nn.log_softmax(y @ x.T)[jnp.arange(6), jnp.arange(6)]
        ),
        (X[0], Y[0]),
        ["linear_cross_entropy", "linear_cross_entropy"],
    ),
    "loss by einsum": (einsum_loss, (X, LABELS), ["cross_entropy of one_hot"]),
    "linear loss by einsum": (
        lambda x, w, labels: einsum_loss(x @ w.T, labels).mean(),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "log-likelihood": (
        lambda x, labels: (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], axis=-1))
        ),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "masked sum, or NaN": (
        lambda x, labels: (
            jax.nn.logsumexp(x, -1)
            - jnp.where(
                labels < 40,
                jnp.sum(jnp.where(jnp.arange(40) == labels[..., None], x, 0), -1),
                jnp.nan,
            )
        ),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "masked sum": (
        lambda x, labels: (
            jax.nn.logsumexp(x, -1)
            - jnp.sum(jnp.where(jnp.arange(40) == labels[..., None], x, 0), -1)
        ),
        (X, LABELS),
        ["cross_entropy"],
    ),
    "one-hot likelihood, weighted": (
        lambda x, labels: jnp.sum(
            jnp.where(labels[..., None] == jnp.arange(40), 1.0, 0.0)
            * jnp.where(LABELS[..., None] > 9, jax.nn.log_softmax(x) * X[..., :1], 0)
        ),
        (X, LABELS),
        ["cross_entropy of one_hot"],
    ),
    "one-hot loss, smoothed, with z-loss": (
        lambda x, labels: (
            one_hot_loss(x, labels) * 0.9
            - 0.1 * jax.nn.log_softmax(x).mean(-1)
            + 0.01 * jax.nn.logsumexp(x, -1) ** 2
        ),
        (X, LABELS),
        ["cross_entropy of one_hot"],
    ),
    "linear loss": (
        lambda x, w, labels: jnp.mean(label_loss(x @ w.T, labels)),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss of one_hot": (
        lambda x, w, labels: -jnp.mean(-one_hot_loss(jax.jit(jnp.matmul)(x, w), labels)),
        (X, W.T, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear log-likelihood": (
        lambda x, w, labels: (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1))
        ),
        (X, W.T, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss, masked": (
        lambda x, w, b, labels: (
            jnp.sum(jnp.where(labels > 9, masked_sum_loss(b + x @ w, labels), 0))
            / jnp.sum(labels > 9)
        ),
        (X, W.T, BIAS, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss in bfloat16": (
        lambda x, w, b, labels: jnp.mean(
            jnp.where(labels < 9, 0, label_loss(wide_product(x, w) + b, labels))
        ),
        (X.astype(jnp.bfloat16), W, BIAS, LABELS),
        ["linear_cross_entropy"],
    ),
    "z-loss": (lambda x, labels: z_loss(capped(x), labels), (X, LABELS), ["cross_entropy"]),
    "smoothed": (smoothed_loss, (X, LABELS), ["cross_entropy"]),
    "smoothed z-loss": (smoothed_z_loss, (X, LABELS), ["cross_entropy"]),
    "loss of one sequence": (label_loss, (X[:1], LABELS[:1]), ["cross_entropy"]),
    "loss under vmap": (jax.vmap(jax.vmap(label_loss)), (X, LABELS), ["cross_entropy"]),
    "linear loss of each": (
        lambda x, w, labels: label_loss(x @ w.T, labels),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss, weighted": (
        lambda x, w, labels, weight: jnp.average(masked_sum_loss(x @ w.T, labels), weights=weight),
        (X, W, LABELS, jnp.abs(X[..., 0])),
        ["linear_cross_entropy"],
    ),
    "linear loss, capped": (
        lambda x, w, b, labels: jnp.mean(label_loss(capped(x @ w.T + b), labels)),
        (X, W, BIAS, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss of the next token": (
        lambda x, w, b, labels: (
            jnp.sum(jnp.where(labels > 9, label_loss((x @ w.T + b)[:, :-1], labels), 0))
            / jnp.sum(labels > 9)
        ),
        (X, W, BIAS, LABELS[:, 1:]),
        ["linear_cross_entropy"],
    ),
    "linear z-loss of one sequence": (
        lambda x, w, labels: jnp.mean(z_loss((x @ w.T)[None], labels[None])),
        (X[0], W, LABELS[0]),
        ["linear_cross_entropy"],
    ),
    "linear loss, smoothed": (
        lambda x, w, labels: jnp.mean(smoothed_loss(x @ w.T, labels)),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss, smoothed and capped": (
        lambda x, w, labels: smoothed_z_loss(capped(x @ w.T), labels),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss under vmap": (
        lambda x, w, labels: label_loss(jax.vmap(lambda x: w @ x)(x), labels).mean(),
        (X[0], W, LABELS[0]),
        ["linear_cross_entropy"],
    ),
    "linear loss of a layer under vmap": (
        lambda x, w, b, labels: jnp.sum(
            shifted_loss(jax.vmap(jax.vmap(lambda x: w @ x + b))(x)[:, :-1], labels)
        ),
        (X, W, BIAS, LABELS[:, 1:]),
        ["linear_cross_entropy"],
    ),
    "linear loss, masked and weighted": (
        lambda x, w, k, labels: jnp.sum(
            jnp.where(labels > 3, z_loss(x @ w.T + BIAS, labels) * k / (1 + k * k), 0)
        ),
        (X, W, X[..., 0], LABELS),
        ["linear_cross_entropy"],
    ),
    "linear loss, moved": (
        lambda x, w, labels: jnp.mean(
            label_loss(jnp.moveaxis(jnp.einsum("bld,vd->vbl", x, w), 0, -1), labels)
        ),
        (X, W, LABELS),
        ["linear_cross_entropy"],
    ),
    "moments": (by_moments, (X, B, C), ["layer_norm"]),
    "var": (by_var, (X, B, C), ["layer_norm"]),
    "inverse": (by_inverse, (X, B, C), ["layer_norm"]),
    "squares": (by_squares, (X, B, C), ["layer_norm"]),
    "multiplied out": (multiplied_out, (X, B, C), ["layer_norm"]),
    "no parameters": (lambda x: by_moments(x, 1.0, 0.0), (X,), ["layer_norm"]),
    "standardize": (jax.nn.standardize, (X,), ["layer_norm"]),
    "residual norm": (
        lambda x, y, s, b: (x + y) + by_var(x + y, s, b),
        (X, Y, B, C),
        ["add + layer_norm"],
    ),
    "bias, residual norm": (
        lambda x, y, i, s, b: by_var(y + (x + i), s, b),
        (X, Y, B[::-1], B, C),
        ["bias + add + layer_norm"],
    ),
    "bias, residual rms": (
        lambda x, y, i, s: (rms((i + x) + y, s), i + x + y),
        (X, Y, C, B),
        ["bias + add + rms_norm"],
    ),
    "parameters in float32": (
        lambda x, y, s, b: by_moments((x + y).astype(jnp.float32), s, b).astype(jnp.bfloat16),
        (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16), B, C),
        ["add + layer_norm"],
    ),
    "rms": (rms, (X, B), ["rms_norm"]),
    "rms by einsum": (rms_by_einsum, (X, B), ["rms_norm"]),
    "rms by einsum in bfloat16": (
        rms_by_einsum,
        (X.astype(jnp.bfloat16), B.astype(jnp.bfloat16)),
        ["rms_norm"],
    ),
    "layer norm by vdot": (
        jax.vmap(jax.vmap(norm_by_vdot, (0, None, None)), (0, None, None)),
        (X, B, C),
        ["layer_norm"],
    ),
    "rms by the size of an array": (
        lambda x, s: (
            x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / jnp.int32(40) + 1e-6) * s
        ),
        (X, B),
        ["rms_norm"],
    ),
    "rms of full mean": (rms_of_full_mean, (X, B), ["rms_norm"]),
    "gemma rms": (gemma_rms, (X, B), ["rms_norm"]),
    "residual rms": (lambda x, y, s: rms(x + y, s), (X, Y, B), ["add + rms_norm"]),
    "batch norm": (batch_norm, (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1]), ["batch_norm"]),
    "batch norm of NCHW": (
        lambda x, s, b: jax.nn.relu(
            (x - x.mean((0, 2, 3), keepdims=True))
            / jnp.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-3)
            * s[:, None, None]
            + b[:, None, None]
        ),
        (IMAGES, IMAGES[0, :, 0, 0], IMAGES[1, :, 0, 0]),
        ["batch_norm + relu"],
    ),
    "group norm, gelu": (
        lambda x, s, b: jax.nn.gelu(group_norm(x, s, b)),
        (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1]),
        ["group_norm + gelu"],
    ),
    "add + group norm of NCHW": (
        lambda x, y, s, b: group_norm_first(x + y, s, b),
        (IMAGES.swapaxes(1, 3), IMAGES.swapaxes(1, 3), IMAGES[0, 0, 0], IMAGES[0, 0, 1]),
        ["add + group_norm"],
    ),
    "instance norm, relu": (
        lambda x, s, b: jax.nn.relu(instance_norm(x, s, b)),
        (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1]),
        ["group_norm + relu"],
    ),
    "batch norm, silu": (
        lambda x, s, b: jax.nn.silu(folded_batch_norm(x, s, b)),
        (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1]),
        ["batch_norm", "silu"],
    ),
    "batch norm, add, relu": (
        lambda x, s, b: jax.nn.relu(x + batch_norm(x, s, b)[0]),
        (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1]),
        ["batch_norm + residual + relu"],
    ),
    "inference": (
        lambda x, m, v, s: jax.nn.relu((x - m) * jax.lax.rsqrt(v**2 + 1e-5) * s),
        (IMAGES, IMAGES[0, 0, 0], IMAGES[0, 0, 1], IMAGES[0, 0, 2]),
        ["batch_norm_inference + relu"],
    ),
    "window": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 5), (1, 1, 1), "SAME"),
        (X,),
        ["window_sum"],
    ),
    "window of a middle axis": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "VALID") / 3,
        (X,),
        ["window_sum"],
    ),
    "split heads": (
        lambda x, b: jnp.swapaxes((b + x).reshape(4, 6, 8, 5), 1, 2),
        (X, B),
        ["bias + split_heads"],
    ),
    "queries, keys, values": (
        lambda x, b: tuple(jnp.moveaxis((x + b).reshape(4, 6, 3, 5, 8), (2, 3), (0, 2))),
        (jnp.concatenate([X, Y, X], -1), jnp.concatenate([B, C, C])),
        ["bias + split_qkv_heads"],
    ),
    "split first": (
        lambda x, b: [
            y.reshape(4, 6, 5, 8).transpose(0, 2, 1, 3) for y in jnp.split(x + b, 3, -1)[::-1]
        ],
        (jnp.concatenate([X, Y, X], -1), jnp.concatenate([B, C, C])),
        ["bias + split_qkv_heads"],
    ),
    "merge heads": (
        lambda x: x.transpose(0, 2, 1, 3).reshape(2, 8, 24) + 1,
        (SCORES,),
        ["merge_heads"],
    ),
    "attention": (
        lambda x, b: (
            lambda q, k, v: ((q @ k.mT) @ v).transpose(0, 2, 1, 3).reshape(4, 6, 40) @ W.T
        )(*jnp.moveaxis((x + b).reshape(4, 6, 3, 5, 8), (2, 3), (0, 2))),
        (jnp.concatenate([X, Y, X], -1), jnp.concatenate([B, C, C])),
        ["bias + split_qkv_heads", "merge_heads"],
    ),
    "lerp": (lambda a, b, w: a + w * (b - a), (X, Y, X * Y), ["lerp"]),
}
