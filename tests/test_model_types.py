"""Model types of transformers that are configurations of ours, as recorded by record_types.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.numerics import assert_close_in_norm

from jax_fastops.models import bert, decoder

safetensors = pytest.importorskip("safetensors.numpy")

from harness.recordings import Recordings, content  # noqa: E402

from jax_fastops.models import bert_checkpoint, decoder_checkpoint  # noqa: E402
from jax_fastops.models._parameters import stack  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
RECORDED = Recordings("types", bert_checkpoint.load, usual="roberta")
DATA = RECORDED.folder
ENCODERS = [name for name in RECORDED.names if name.startswith(("r", "distil", "electra"))]
DECODERS = [name for name in RECORDED.names if name not in ENCODERS]


def assert_close(found, wanted) -> None:
    """To 1e-5, also for dtypes that differ from those of the recordings."""
    assert_close_in_norm(found, wanted, 1e-5, dtypes=False)


def encoded(params, inputs, config) -> dict[str, jax.Array]:
    """Hidden states, zero for padding, and the logits of a head."""
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    hidden, pooled = bert.apply(params, tokens, config, mask=mask)
    if "mlm" in params:
        logits = bert.masked_lm_logits(params, hidden, config)
    else:
        states = hidden if pooled is None else pooled
        logits = states @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    return without_padding({"hidden": hidden, "logits": logits}, mask)


def without_padding(found: dict, mask) -> dict:
    return {k: a * mask[..., None] if a.ndim == 3 else a for k, a in found.items()}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(native, name):
    recorded = RECORDED.arrays(name)
    config, params = bert_checkpoint.load(DATA / name, dtype="float32")
    found = jax.jit(encoded, static_argnames="config")(params, recorded["inputs"], config=config)
    assert_close(found, without_padding(recorded["outputs"], recorded["inputs"]["attention_mask"]))


@pytest.mark.parametrize("name", ENCODERS)
def test_saved_encoders(tmp_path, name):
    """With ``like``, the files are the same. Without it, the network is."""
    config, params = bert_checkpoint.load(DATA / name, dtype="float32")
    bert_checkpoint.save(tmp_path / "like", config, params, like=DATA / name)
    assert content(tmp_path / "like") == content(DATA / name)
    saved = safetensors.load_file(tmp_path / "like" / "model.safetensors")
    wanted = RECORDED.tensors(name)
    for tensor in wanted:
        if "position_embeddings" in tensor and name.startswith("roberta"):
            wanted[tensor][:2] = 0  # rows that no token has
    assert saved.keys() == wanted.keys()
    jax.tree.map(np.testing.assert_array_equal, saved, wanted)
    bert_checkpoint.save(tmp_path / "new", config, params)
    assert content(tmp_path / "new")["model_type"] == name.split("-")[0].replace("roberta", "bert")
    again, params_again = bert_checkpoint.load(tmp_path / "new", dtype="float32")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(native, name):
    """Logits, and greedy tokens after prompts with padding on the left."""
    recorded = RECORDED.arrays(name)
    tokens, mask = recorded["inputs"]["input_ids"], recorded["inputs"]["mask"]
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")

    @jax.jit
    def outputs(params, tokens):
        hidden = decoder.apply(params, tokens, config)
        return decoder.logits(params, hidden, config)

    assert_close(outputs(params, tokens), recorded["outputs"]["logits"])
    wanted = recorded["outputs"]["generated"]
    generate = jax.jit(decoder.generate, static_argnames=("config", "length"))
    found, _ = generate(params, tokens, config, length=wanted.shape[1], mask=mask)
    np.testing.assert_array_equal(found, wanted)


VARIANTS = {
    "olmo2": dict(scan=True, remat=True),
    "gemma2": dict(remat=True),
    "gemma3_text": dict(remat=True),
    "gpt2": dict(scan=True, remat=True),
    "gpt2-tensor": dict(tensor_parallel=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_and_gradients(native, variant):
    """Losses and gradients, with padding, are those of plain JAX without the options."""
    name, changes = variant.split("-")[0], VARIANTS[variant]
    tokens, mask = RECORDED.arrays(name)["inputs"].values()

    @functools.partial(jax.jit, static_argnames=("config", "ops"))
    def losses(params, config, ops):
        return jax.value_and_grad(decoder.loss)(params, tokens, config, mask=mask, ops=ops)

    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    loss, wanted = losses(params, config, decoder.PLAIN)
    if changes.get("scan"):
        params, wanted = (tree | {"layers": stack(tree["layers"])} for tree in (params, wanted))
    found = losses(params, dataclasses.replace(config, **changes), decoder.FASTOPS)
    assert_close(without_zeros(found), without_zeros((loss, wanted)))


@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), ("bfloat16", 4e-3), ("float16", 6e-4)]
)
def test_softcap(dtype, tolerance):
    """Attention with a softcap, segments and grouped heads is the formula, and so are gradients."""
    rng = np.random.default_rng(0)
    shapes = (1, 64, 4, 16), (1, 64, 2, 16), (1, 64, 2, 16)
    q, k, v = (jnp.asarray(3 * rng.standard_normal(shape), dtype) for shape in shapes)
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 30, 14])[None])

    def formula(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = 5 * jnp.tanh(jnp.einsum("bqnd,bknd->bnqk", q, k) * 0.25 / 5)
        allowed = jnp.tri(64, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None])
        p = jnp.exp(scores) * allowed
        return jnp.einsum("bnqk,bknd->bqnd", p / p.sum(-1, keepdims=True), v)

    def found(q, k, v):
        return decoder.PLAIN.attention(q, k, v, segment_ids=ids, softcap=5.0, is_causal=True)

    def with_gradients(fn, *args):
        y, vjp = jax.vjp(fn, *args)
        return y, vjp(v_bar.astype(y.dtype))

    v_bar = jnp.asarray(rng.standard_normal(shapes[0]), dtype)
    wide = (x.astype("float32") for x in (q, k, v))
    wanted = with_gradients(formula, *wide)
    assert_close_in_norm(with_gradients(found, q, k, v), wanted, tolerance, dtypes=False)


def test_sampling_with_a_softcap(native):
    """Tokens are drawn by the logits that the softcap has changed."""
    config = dataclasses.replace(
        decoder.SMALL, layers=1, dtype="float32", init_range=0.5, logits_softcap=1.0
    )
    params, key = decoder.init(jax.random.key(0), config), jax.random.key(1)
    tokens = np.arange(64, dtype=np.int32).reshape(16, 4)
    found, _ = decoder.generate(params, tokens, config, length=1, key=key, temperature=1)

    def drawn(config):
        logits = decoder.logits(params, decoder.apply(params, tokens, config)[:, -1], config)
        return jax.random.categorical(jax.random.fold_in(key, 0), logits)

    np.testing.assert_array_equal(found[:, 0], drawn(config))
    assert (drawn(config) != drawn(dataclasses.replace(config, logits_softcap=None))).any()


def without_zeros(gradients):
    """With ones for the biases of keys, whose gradient is 0 except for rounding."""

    def of(path, leaf):
        names = [getattr(step, "key", None) for step in path[-2:]]
        return np.ones(leaf.shape) if names == ["k", "bias"] else leaf

    return jax.tree.map_with_path(of, gradients)


@pytest.mark.parametrize("name", DECODERS)
def test_saved_decoders(tmp_path, name):
    """With ``like``, the files are the same. Without it, the network is."""
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    decoder_checkpoint.save(tmp_path / "like", config, params, like=DATA / name)
    assert content(tmp_path / "like") == content(DATA / name)
    saved = safetensors.load_file(tmp_path / "like" / "model.safetensors")
    wanted = RECORDED.tensors(name)
    assert saved.keys() == wanted.keys()
    assert_close(saved, wanted)
    decoder_checkpoint.save(tmp_path / "new", config, params)
    kind = {"phi3": "mistral"}.get(name, name.split("-")[0])
    assert content(tmp_path / "new")["model_type"] == kind
    again, params_again = decoder_checkpoint.load(tmp_path / "new", dtype="float32")
    assert again == config
    assert_close(params_again, params)


@pytest.mark.parametrize("module", [bert_checkpoint, decoder_checkpoint])
def test_defaults_of_live_transformers(module):
    """A config.json without a key means what it means in transformers."""
    auto = pytest.importorskip("transformers").AutoConfig
    for name in module.TYPES:
        theirs = auto.for_model(name).to_dict()
        assert module._config_of({"model_type": name}) == module._config_of(theirs), name


def test_names_of_gpt2(tmp_path):
    """Files may have no prefix, and old ones have masks."""
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in RECORDED.tensors("gpt2").items()
    }
    assert "h.0.attn.c_attn.bias" in tensors
    tensors["h.0.attn.bias"] = np.ones((1, 1, 24, 24), bool)
    tensors["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    found = decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "gpt2"))
    wanted = decoder_checkpoint.load(DATA / "gpt2")
    assert found[0] == wanted[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], wanted[1])


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="'relu', but the head of RobertaForMaskedLM always has"):
        bert_checkpoint.load(
            RECORDED.written(tmp_path, RECORDED.tensors("roberta"), "roberta", hidden_act="relu")
        )
    with pytest.raises(ValueError, match="scan is True, but full_layers is"):
        decoder_checkpoint.load(DATA / "gemma3_text", scan=True)
    config, params = decoder_checkpoint.load(DATA / "gpt2")
    tokens = np.ones((1, 25), np.int32)
    with pytest.raises(ValueError, match="the length of tokens is 25, but config has 24 positions"):
        decoder.apply(params, tokens, config)
    with pytest.raises(ValueError, match="capacity is 25, but config has 24 positions"):
        decoder.generate(params, tokens[:, :20], config, length=6)
    config, params = bert_checkpoint.load(DATA / "distilbert")
    with pytest.raises(ValueError, match="token_types is given; config has none"):
        bert.apply(params, tokens[:, :5], config, token_types=tokens[:, :5])
    for changes, message in (
        (dict(unrotated_layers=(2,)), "unrotated_layers has 2, but layers is 2"),
        (dict(norms="post", qk_norm=True, tensor_parallel=True), "tensor_parallel is True, but"),
        (dict(attention_softcap=1.0, attention="xla"), "with attention_softcap it must be 'softm"),
        (dict(logits_softcap=0), "logits_softcap is 0.0; it must be positive and finite"),
        (dict(norms="none"), "norms is 'none'; it must be one of 'pre', 'post', 'both'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(decoder.SMALL, **changes)
