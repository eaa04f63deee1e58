"""The report of `autofuse`: its width, its HTML, what a derivative hides, and no false misses."""

import html.parser
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from autofuse_programs import B, C, W, X, Y, by_moments, label_loss, rms

import jax_fastops as fo
from jax_fastops._registry import families
from jax_fastops.autofuse import FuseReport, Missed, Replaced

pytestmark = pytest.mark.usefixtures("native")
KEY = jax.random.key(0)
LABELS = jnp.zeros(X.shape[:2], jnp.int32)


def dropped(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.75, x.shape), x / 0.75, 0)


def block(x, w):
    h = x + B
    h = jax.nn.gelu(h) + jnp.sin(h)
    logits = rms(x + dropped(2 * h), C) @ w.T
    return label_loss(logits, LABELS).mean(), logits


WORDS = "a rather long explanation of why something was not taken " * 4
PATH = "/home/user/.venv/lib/python3.12/site-packages/some_library/layers/normalization.py:1234:56"
LONG = FuseReport(
    (Replaced("bias + dropout + add + layer_norm", PATH, (2, 3), "float32", 10**9, WORDS),),
    (
        Missed(
            "attention + dropout", PATH, f"select_n({', '.join(['float32[1,2,3]'] * 9)})", WORDS
        ),
        Missed("softmax", "", "", "<b>" + "x" * 300),
    ),
)


def test_a_report_is_at_most_100_columns_wide():
    for report in (LONG, fo.autofuse.report(block)(X, W)):
        text = str(report)
        assert max(map(len, text.splitlines())) <= 100
        for r in (*report.replaced, *report.missed):  # all words are there, and the ends of paths
            assert r.pattern.split()[-1] in text and r.where[-15:] in text
    assert " ".join(str(LONG).split()).count("explanation") == 8
    assert "some_library" not in str(LONG) and "...)" in str(LONG)


def test_an_empty_report():
    report = fo.autofuse.report(jnp.sin)(X)
    assert str(report) == report._repr_html_().removeprefix("<p>").removesuffix("</p>")
    assert report.to_markdown() == "0 patterns replaced"


class Cells(html.parser.HTMLParser):
    """The text of the cells, by table and row."""

    def __init__(self):
        super().__init__()
        self.tables, self.tags, self.tag = [], set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.tag = tag
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])

    def handle_data(self, data):
        if self.tag in ("td", "th"):
            self.tables[-1][-1].append(data)


def test_the_html_of_a_report():
    """Two tables, whose text is escaped and whole."""
    cells = Cells()
    cells.feed(LONG._repr_html_())
    assert cells.tags == {"p", "table", "tr", "th", "td"}
    (replaced, missed) = cells.tables
    assert replaced[0] == ["pattern", "result", "saves", "where", "why"]
    assert replaced[1] == [LONG.replaced[0].pattern, "float32[2,3]", "1 GB", PATH, WORDS]
    assert missed[2] == ["softmax", LONG.missed[1].reason] and len(missed) == 3  # empty cells


def test_the_markdown_of_a_report():
    """Two tables, with all of the text. What Markdown reads is escaped."""
    replaced = Replaced("gelu", "<cell>", (2, 3), "float32", 24, "x | y")
    long = LONG.missed[1].reason.replace("<", "&lt;")
    assert FuseReport((replaced,), LONG.missed[1:]).to_markdown().splitlines() == [
        "1 pattern replaced",
        "",
        "| pattern | result | saves | where | why |",
        "| --- | --- | --- | --- | --- |",
        r"| gelu | float32[2,3] | 24 B | &lt;cell> | x \| y |",
        "",
        "1 pattern left",
        "",
        "| pattern | up to | where | why |",
        "| --- | --- | --- | --- |",
        f"| softmax |  |  | {long} |",
    ]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("derivative", [jax.grad, jax.value_and_grad])
def test_a_derivative_says_what_it_hides(derivative, jitted):
    def loss(x, w, scale=1.0):
        return block(x, w)[0] * scale

    step = derivative(loss)
    step = jax.jit(step) if jitted else step
    report = fo.autofuse.report(fo.autofuse(step, dropout=True))(X, W, scale=2.0)
    reason = report.missed[0].reason
    assert "put grad around autofuse: jax.grad(autofuse(f)). This would replace " in reason
    assert "gelu" in reason and "dropout + add + rms_norm" in reason
    assert all(m.pattern == "derivative" for m in report.missed)


def test_a_step_with_a_derivative_inside():
    def step(x, w):
        return x - jax.grad(lambda x: jnp.sum(jnp.sin(jax.nn.softmax(x) @ w.T)))(x)

    with pytest.warns(UserWarning, match="put grad around autofuse") as warned:
        (missed,) = fo.autofuse.report(jax.jit(step))(X, W).missed
    assert missed.pattern == "derivative" and "would" not in missed.reason
    assert [w.filename for w in warned] == [__file__]


def test_the_documentation_says_which_ops_have_a_pattern():
    guide = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "patterns.md"
    text = guide.read_text()
    text = text[text.index("## What autofuse replaces") : text.index("## Limits")]
    names = {name for calls in families().values() for name in calls if hasattr(fo, name)}
    assert len(names) > 20 and not {name for name in names if f"`{name}`" not in text}


# What is nearly nothing ---------------------------------------------------------------------------


TABLE = jnp.ones((32, 5))


def relative_positions(table):
    """The biases of T5."""
    distance = jnp.arange(6)[None] - jnp.arange(6)[:, None]
    is_after, distance = distance > 0, jnp.abs(distance)
    far = 8 + (jnp.log(distance / 8) / math.log(16) * 8).astype(jnp.int32)
    bucket = jnp.where(is_after, 16, 0) + jnp.where(distance < 8, distance, jnp.minimum(far, 15))
    return table[bucket].transpose(2, 0, 1)[None]


def adam(p, g):
    m, v = 0.9 * p + 0.1 * g, 0.999 * p**2 + 0.001 * g**2
    return p - 1e-3 * ((m / (1 - 0.9)) / (jnp.sqrt(v / (1 - 0.999)) + 1e-8) + 0.01 * p), m, v


def rotary(x, y):
    angles = jnp.arange(6)[:, None] / 1e4 ** (jnp.arange(20) / 20)
    a, b = jnp.split(x * y, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def gate(x, y):
    """A gate of an LSTM in bfloat16, and its state in float32."""
    w = jnp.ones((x.shape[-1], 8), jnp.bfloat16)
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    hidden = jax.nn.sigmoid(x @ w + (y @ w + jnp.ones(8, jnp.bfloat16)))
    return hidden.astype(jnp.float32) * jnp.ones((*x.shape[:-1], 8))


OTHERS = {
    "gate of an LSTM": (gate, (X, Y)),
    "relative positions": (relative_positions, (TABLE,)),
    "adam": (adam, (X, Y)),
    "rotary": (rotary, (X, Y)),
    "mean squared error": (lambda x, y: jnp.mean((x - y) ** 2), (X, Y)),
    "normalized": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), (X,)),
    "softplus": (jax.nn.softplus, (X,)),
    "elu": (jax.nn.elu, (X,)),
    "gaussian": (lambda x, m, s: 0.5 * ((x - m) / s) ** 2 + jnp.log(s), (X, Y, X * X + 1)),
    "gate": (lambda x, y: jax.nn.sigmoid(x) * y + (1 - jax.nn.sigmoid(x)) * jnp.tanh(x), (X, Y)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_false_misses(name):
    f, args = OTHERS[name]
    report = fo.autofuse.report(f)(*args)
    assert {r.pattern for r in report.replaced} <= {"take"} and not report.missed


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "adafactor", "rmsprop", "lion"])
def test_no_false_misses_in_optimizers(name):
    optax = pytest.importorskip("optax")
    optimizer = getattr(optax, name)(1e-3)

    def step(p, g):
        updates, state = optimizer.update(g, optimizer.init(p), p)
        return optax.apply_updates(p, updates), state

    report = fo.autofuse.report(step)(X, Y)
    assert not report.replaced and not report.missed


def narrow_norm(x):
    return by_moments(x.astype(jnp.float32), B, C).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    "f, x, found",
    [
        (lambda x: rms(x, B) + C, X, ["rms_norm"]),  # no layer norm
        (lambda x: narrow_norm(x) * Y, X.astype(jnp.bfloat16), ["layer_norm"]),
    ],
)
def test_no_false_misses_around_what_is_replaced(f, x, found):
    report = fo.autofuse.report(f)(x)
    assert [r.pattern for r in report.replaced] == found and not report.missed


def test_a_smaller_pattern_of_the_same_name():
    """As in T5: the scale is float32, and so is the result."""

    def f(x):
        return B * rms(x.astype(jnp.float32), 1.0).astype(jnp.bfloat16)

    report = fo.autofuse.report(f)(X.astype(jnp.bfloat16))
    assert [(r.pattern, r.dtype) for r in report.replaced] == [("rms_norm", "bfloat16")]
    (missed,) = report.missed
    assert missed.pattern == "rms_norm" and "narrower than the result's float32" in missed.reason


@pytest.mark.parametrize(
    "f, pattern",
    [
        (lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * x**3))), "gelu"),
        (lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / 39 + 1e-6) * B, "rms_norm"),
        (lambda x: by_moments(x, 1.0, x), "layer_norm"),
        (
            lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x).sum(-1, keepdims=True),
            "softmax",
        ),
    ],
)
def test_what_is_nearly_a_pattern(f, pattern):
    report = fo.autofuse.report(f)(X)
    assert any(pattern in r.pattern for r in (*report.missed, *report.replaced)), report
