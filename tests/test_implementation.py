"""The choice of the implementation: the setter, the context manager, the measured table."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastops as fo
from jax_fastops import _dispatch, _names, _native
from jax_fastops._broadcast import features_of
from jax_fastops._implementation import current
from jax_fastops.models import bert, decoder


@pytest.fixture(autouse=True)
def restored():
    before = current()
    yield
    fo.set_implementation(before)


def test_a_block_overrides_the_choice_of_the_process():
    block = fo.use_implementation("xla")
    fo.set_implementation("native")
    with block:
        assert current() == "xla"
        with block:  # again, inside itself
            assert current() == "xla"
        fo.set_implementation("auto")
        assert current() == "xla"
    assert current() == "auto"
    assert block(current)() == "xla"


def test_threads_in_blocks_leave_the_choice_of_the_process_alone():
    fo.set_implementation("auto")
    wrong = []

    def work(value):
        for _ in range(2000):
            with fo.use_implementation(value):
                if current() != value:
                    wrong.append(current())

    threads = [threading.Thread(target=work, args=(value,)) for value in ("native", "xla")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert current() == "auto"


@pytest.mark.parametrize("choose", [fo.set_implementation, fo.use_implementation])
def test_an_unknown_implementation_changes_nothing(choose):
    fo.set_implementation("native")
    with pytest.raises(ValueError, match="implementation is 'fast'; it must be one of"):
        choose("fast")
    assert current() == "native"


@pytest.mark.parametrize("op", [fo.relu, fo.transpose])
def test_without_jit(op):
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    with fo.use_implementation("native"):
        expected = op(jnp.asarray(x))
        with jax.disable_jit():
            np.testing.assert_array_equal(op(jnp.asarray(x)), expected)
            gradient = jax.grad(lambda x: (op(x) ** 2).sum())(jnp.asarray(x))
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: (op(x) ** 2).sum())(x))


@pytest.mark.parametrize(
    "architecture, capability, covered",
    [
        ("90-real", "9.0", True),
        ("80-real", "8.6", True),
        ("86-real", "8.0", False),
        ("80-real", "9.0", False),
        ("90-virtual", "12.0", True),
        ("90-virtual", "8.9", False),
        ("80", "9.0", True),
        ("90a-real", "9.0", True),
        ("90a", "10.0", False),
        ("100-real", "10.3", True),
        ("120-virtual", "10.0", False),
        ("native", "7.5", True),
    ],
)
def test_which_devices_a_build_covers(architecture, capability, covered):
    assert _native._covers(architecture, capability) is covered


def test_kernels_that_cannot_run_here_are_not_used(monkeypatch):
    monkeypatch.setattr(_native, "runs_here", lambda platform: False)
    x = jnp.ones((64, 33))
    with fo.use_implementation("native"):
        text = jax.jit(lambda x: fo.relu(fo.transpose(x))).lower(x).as_text()
    assert "custom_call" not in text


def test_weakly_typed_numbers_of_different_kinds_stay_weak():
    expected = jax.nn.relu(jnp.add(1, 2.5))
    found = fo.add_relu(1, 2.5)
    assert found == expected
    assert (found * jnp.bfloat16(1)).dtype == (expected * jnp.bfloat16(1)).dtype == jnp.bfloat16


def test_a_dtype_error_names_the_argument_that_sets_the_dtype():
    from jax_fastops._arguments import as_arrays, same_floating_dtype

    arrays = as_arrays("op", a=0.0, b=jnp.ones(2, jnp.bfloat16), c=jnp.ones(2, jnp.float32))
    with pytest.raises(TypeError, match="c has dtype float32, but b has dtype bfloat16"):
        same_floating_dtype("op", arrays, ["a", "b", "c"])


@pytest.mark.parametrize("value", [jax.ShapeDtypeStruct((3,), "float32"), "text", None, [1.0]])
def test_what_is_no_array_is_refused(value):
    with pytest.raises(TypeError, match="relu: x is"):
        fo.relu(value)


def test_a_reference_is_refused():
    reference = jax.new_ref(jnp.ones(3))
    with pytest.raises(TypeError, match="relu: x is of type Ref"):
        fo.relu(reference)


X = np.ones((2, 8), np.float32)
WORDS = np.array([[5, 6, 7]])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fo.layer_norm(X, epsilon=1e-5), "no argument epsilon; pass eps"),
        (lambda: fo.residual_rms_norm(X, X, axis=0), "no argument axis; the last axis is"),
        (lambda: fo.group_norm(X, num_groups=2, epsilon=1e-5), "no argument epsilon; pass eps"),
        (lambda: fo.batch_norm(X, None, None, epsilon=1e-5), "no argument epsilon; pass eps"),
        (lambda: fo.softmax(X, initial=0), "no argument initial; it is only in jax.nn.softmax"),
        (lambda: bert.apply({}, WORDS, bert.SMALL, attention_mask=X), "attention_mask; pass mask"),
        (lambda: decoder.loss({}, WORDS, decoder.SMALL, attention_mask=X), "pass mask"),
        (lambda: decoder.generate({}, WORDS, decoder.SMALL, max_new_tokens=1), "pass length"),
        (lambda: fo.max_pool(X, "two"), "window is 'two'; it must have a number for each of 2 ax"),
        (lambda: fo.max_pool(X, 2), "window is 2; it must have a number for each of 2 axes"),
        (lambda: fo.autofuse.report(3), "report: fn is of type int; it must be a function"),
        (lambda: fo.bias_act(X, None, activation=jax.nn.gelu), "is the function gelu; it must be"),
        (lambda: fo.gelu, r"no attribute 'gelu' \(use bias_act\(x, activation=...\)\)"),
        (lambda: fo.scaled_dot_product_attention, r"\(use attention\)"),
        (lambda: fo.rope, r"\(use split_qkv_heads\(qkv, num_heads=..., rotary=...\)\)"),
        (lambda: fo.nothing, "no attribute 'nothing'$"),
    ],
)
def test_a_wrong_call_says_what_is_right(call, message):
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        call()


def test_modules_are_imported_by_their_names():
    assert _names.advice("nnx") == " (it is a module: import jax_fastops.nnx)"


@pytest.mark.parametrize("advice", _names._FUNCTIONS.values())
def test_what_is_named_in_place_of_another_library_s_function_exists(advice):
    assert advice.partition("(")[0] in fo.__all__


def test_one_object_in_two_threads():
    native = fo.use_implementation("native")
    fo.set_implementation("auto")
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with native:
            entered.set()
            leave.wait()
        seen.append(current())

    thread = threading.Thread(target=other)
    with native:
        thread.start()
        entered.wait()
    assert current() == "auto"
    with native:
        leave.set()
        thread.join()
        assert current() == "native"
    assert seen == ["auto"]


def test_auto_goes_by_what_operands_broadcast_to(monkeypatch):
    tree = ["aligned", 1, False, ["row_bytes", 1024, False, ["bytes", 64 * 2048, False, True]]]
    entry = {"lerp": {"float32": {"forward": tree, "grad": tree}}}
    monkeypatch.setattr(_dispatch, "trees", lambda platform: entry)
    fo.set_implementation("auto")

    def takes_kernel(*shapes):
        args = [jnp.ones(shape) for shape in shapes]
        return "fastops_lerp" in str(jax.make_jaxpr(lambda *xs: fo.lerp(*xs))(*args))

    assert takes_kernel((64, 1), (1, 512), (1,))
    assert not takes_kernel((63, 1), (1, 512), (1,))
    assert not takes_kernel((64, 1), (1, 513), (1,))
    assert not takes_kernel((1024, 1), (1, 64), (1,))
    assert not takes_kernel((64, 1), (1, 508), (1,))  # too few
    assert takes_kernel((66, 1), (1, 508), (1,))  # a multiple of 16 bytes


def test_the_features_of_broadcast_operands():
    def features(shapes, dtype=np.float32):
        found = features_of(shapes, dtype)
        return found["groups"], found["row_bytes"], found["aligned"], found["broadcast"]

    assert features([(4, 8, 1024), (4, 1, 1024)]) == (3, 4096, True, True)
    assert features([(4, 8, 1004), (1004,)]) == (2, 4016, True, True)
    assert features([(4, 8, 1004), (1004,)], jnp.bfloat16) == (2, 2008, False, True)
    assert features([(4, 16, 16), (4, 1, 1)]) == (2, 1024, True, True)
    assert features([(4, 16), (4, 16)]) == (1, 256, True, False)
    assert features([(4, 16), (1,)]) == (1, 256, True, False)
