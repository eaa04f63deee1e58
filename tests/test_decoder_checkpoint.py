"""Decoders equal those of transformers, as recorded by record_decoder.py; checkpoint files."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness.compat import x64
from harness.numerics import assert_close_in_norm, norm_errors

from jax_fastops.models import decoder

safetensors = pytest.importorskip("safetensors.numpy")

from harness.recordings import Recordings  # noqa: E402

from jax_fastops.models import decoder_checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
RECORDED = Recordings("decoder", decoder_checkpoint.load, usual="llama")
DATA, RECORDINGS = RECORDED.folder, RECORDED.names
TOLERANCE = 1e-4
# Recordings are in float32.
assert_close = functools.partial(assert_close_in_norm, dtypes=False)
OPS = {"ours": decoder.FASTOPS, "plain": decoder.PLAIN}


def arrays(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Inputs, outputs, outputs in bfloat16, and generated tokens.

    Logits of padding are replaced by zeros, because padding may attend to nothing.
    """
    found = RECORDED.arrays(name)
    for kind in ("outputs", "bfloat16"):
        found[kind]["logits"] = without_padding(found[kind]["logits"], found["inputs"])
    return found


def without_padding(logits, inputs):
    return logits * inputs["attention_mask"][..., None] if "attention_mask" in inputs else logits


def options_of(inputs) -> dict:
    names = {"attention_mask": "mask", "position_ids": "positions"}
    return {names[key]: value for key, value in inputs.items() if key in names}


@functools.partial(jax.jit, static_argnames=("config", "ops"))
def outputs(params, inputs, config, ops=decoder.FASTOPS) -> dict[str, jax.Array]:
    tokens, options = inputs["input_ids"], options_of(inputs)
    hidden = decoder.apply(params, tokens, config, **options, ops=ops)
    loss = decoder.loss(params, tokens, config, **options, ops=ops)
    logits = without_padding(decoder.logits(params, hidden, config), inputs)
    return {"logits": logits, "loss": loss}


@functools.partial(jax.jit, static_argnames=("config", "ops"))
def gradients(params, inputs, config, ops=decoder.FASTOPS):
    tokens, options = inputs["input_ids"], options_of(inputs)
    return jax.grad(decoder.loss)(params, tokens, config, **options, ops=ops)


# ---- recordings of transformers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, which", [*((name, "ours") for name in RECORDINGS), ("qwen3", "plain")]
)
def test_equals_transformers(native, tmp_path, name, which):
    """Logits, loss, and the gradient of every parameter."""
    recorded = arrays(name)
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    assert_close(
        outputs(params, recorded["inputs"], config, OPS[which]), recorded["outputs"], TOLERANCE
    )
    found = gradients(params, recorded["inputs"], config, OPS[which])
    assert_close(found, RECORDED.gradients(name, tmp_path), TOLERANCE)


VARIANTS = {
    "attention": dict(attention="xla"),
    "remat": dict(remat=True),
    "scan": dict(scan=True),
    "scan-remat": dict(scan=True, remat=True),
    "tensor-parallel": dict(tensor_parallel=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "qwen3-window"])
def test_variants_equal_transformers(native, tmp_path, name, variant):
    changes, recorded = VARIANTS[variant], arrays(name)
    scan = changes.get("scan", False)
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32", scan=scan)
    config = dataclasses.replace(config, **changes)
    assert_close(outputs(params, recorded["inputs"], config), recorded["outputs"], TOLERANCE)
    found = gradients(params, recorded["inputs"], config)
    assert_close(found, RECORDED.gradients(name, tmp_path, scan=scan), TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_float64(name, tmp_path):
    """The recording is in float32, and so are the parameters."""
    recorded = arrays(name)
    with x64():
        config, params = decoder_checkpoint.load(DATA / name, dtype="float64")
        found = outputs(params, recorded["inputs"], config)
        assert {a.dtype for a in found.values()} == {np.dtype("float64")}
        assert_close(found, recorded["outputs"], 1e-5)


@pytest.mark.parametrize("name", RECORDINGS)
def test_bfloat16(native, name):
    """The error against float32 is at most 1.5 times that of transformers in bfloat16."""
    recorded = arrays(name)
    config, params = decoder_checkpoint.load(DATA / name)
    assert config.dtype == "bfloat16"
    found = outputs(params, recorded["inputs"], config)
    mine, theirs = (norm_errors(x, recorded["outputs"]) for x in (found, recorded["bfloat16"]))
    # The loss is one number, whose error may be small by chance.
    assert mine["['logits']"] <= 1.5 * theirs["['logits']"] < 0.05
    assert mine["['loss']"] <= max(1.5 * theirs["['loss']"], 5e-3)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_generates_the_same_tokens(native, name, scan):
    if scan and name.startswith("llama"):
        pytest.skip("one model is enough")
    recorded = arrays(name)
    prompt, wanted = recorded["inputs"]["input_ids"], recorded["generated"]
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32", scan=scan)
    static = ("config", "length", "end")
    generate = jax.jit(decoder.generate, static_argnames=static)
    count, end = wanted["free"].shape[1], int(wanted["end"])
    free, lengths = generate(params, prompt, config, length=count, mask=wanted["mask"])
    np.testing.assert_array_equal(free, wanted["free"])
    assert lengths.tolist() == [count] * len(prompt)
    ended, lengths = generate(params, prompt, config, length=count, end=end, mask=wanted["mask"])
    for mine, n, theirs in zip(ended, lengths, wanted["ended"], strict=True):
        np.testing.assert_array_equal(mine[:n], theirs[:n])
        assert n == count or (mine[n - 1 :] == end).all()
        assert not (mine[: n - 1] == end).any()
    assert lengths[0] <= count // 2 + 1


# ---- against transformers itself -----------------------------------------------------------------


def live(kind: str, **more):
    """A model of transformers with random weights, and its module."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=80,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls(cls.config_class(**config | more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(name.endswith("norm.weight") + scale * torch.randn(parameter.shape))
    return model


LIVE = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", dict(head_dim=12, tie_word_embeddings=True)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    "mistral": ("Mistral", dict(sliding_window=4)),
}


@pytest.mark.parametrize("name", LIVE)
def test_equals_live_transformers(tmp_path, name):
    kind, more = LIVE[name]
    model = live(kind, **more)
    import torch

    tokens = torch.randint(211, (2, 17))
    found = model(input_ids=tokens, labels=tokens)
    found.loss.backward()
    model.save_pretrained(tmp_path / "model")
    config, params = decoder_checkpoint.load(tmp_path / "model", dtype="float32")
    given = {"input_ids": tokens.numpy().astype(np.int32)}
    wanted = {"logits": found.logits.detach().numpy(), "loss": found.loss.detach().numpy()}
    assert_close(outputs(params, given, config), wanted, TOLERANCE)
    grads = gradients(params, given, config)
    decoder_checkpoint.save(tmp_path / "gradients", config, grads)
    saved = safetensors.load_file(tmp_path / "gradients" / "model.safetensors")
    assert_close(saved, {n: p.grad.numpy() for n, p in model.named_parameters()}, TOLERANCE)


@pytest.mark.parametrize("name", RECORDINGS)
def test_transformers_reads_what_is_saved(tmp_path, name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, params = decoder_checkpoint.load(DATA / name, dtype="float32")
    decoder_checkpoint.save(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    import torch

    inputs = arrays(name)["inputs"]
    with torch.no_grad():
        found = model(**{key: torch.from_numpy(a).long() for key, a in inputs.items()})
    found = without_padding(found.logits.numpy(), inputs)
    assert_close(found, arrays(name)["outputs"]["logits"], TOLERANCE)


# ---- names and files -----------------------------------------------------------------------------


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_save(tmp_path, name, scan):
    """What is saved is loaded; the tensors are those of transformers."""
    config, params = decoder_checkpoint.load(DATA / name, scan=scan)
    decoder_checkpoint.save(tmp_path, config, params)
    again, loaded = decoder_checkpoint.load(tmp_path, scan=scan)
    assert again == config and same(loaded, params)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert saved.keys() == RECORDED.tensors(name).keys() and same(saved, RECORDED.tensors(name))


def test_several_files(tmp_path):
    tensors = RECORDED.tensors("llama")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        safetensors.save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = {name: file for file, own in files.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(DATA / "llama" / "config.json", tmp_path)
    found, wanted = (decoder_checkpoint.load(path) for path in (tmp_path, DATA / "llama"))
    assert found[0] == wanted[0] and same(found[1], wanted[1])


def test_low_precision_tensors(tmp_path):
    tensors = {name: a.astype(jnp.bfloat16) for name, a in RECORDED.tensors("qwen3").items()}
    _, params = decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))
    wanted = tensors["model.norm.weight"].astype(np.float32)
    assert params["norm"]["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(params["norm"]["scale"], wanted)


def test_former_names_of_rope(tmp_path):
    config = json.loads((DATA / "llama" / "config.json").read_text())
    rope = config["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    RECORDED.written(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    found, wanted = (decoder_checkpoint.load(path)[0] for path in (tmp_path, DATA / "llama"))
    assert found == wanted and found.rope_scaling is not None


def test_tied_head_in_the_file(tmp_path):
    tensors = RECORDED.tensors("qwen3")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))[0].tied
    tensors["lm_head.weight"] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        decoder_checkpoint.load(RECORDED.written(tmp_path, tensors, "qwen3"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="gpt2"), r"model_type in config\.json is 'gpt2'; it must be one of"),
        (dict(hidden_act="gelu"), "hidden_act .* is 'gelu'; supported is 'silu'"),
        (dict(mlp_bias=True), "mlp_bias .* is True; supported is False"),
        (dict(vocab_size=None), r"config\.json has no vocab_size"),
        (dict(rope_parameters=dict(rope_type="yarn")), "rope_type in .* is 'yarn'"),
        (dict(num_hidden_layers=1), r"tensors not known: model\.layers\.1\.input_layernorm"),
        (dict(num_hidden_layers=3), r"tensors missing: model\.layers\.2\.input_layernorm"),
        (dict(intermediate_size=25), r"of another shape: .*layers\.0\.mlp\.gate_proj\.weight"),
        (
            dict(model_type="qwen3", use_sliding_window=True, max_window_layers=1),
            "some layers have a sliding window",
        ),
    ],
)
def test_errors(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        decoder_checkpoint.load(RECORDED.written(tmp_path, **changes))


def test_no_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        decoder_checkpoint.load(tmp_path)
    shutil.copy(DATA / "llama" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        decoder_checkpoint.load(tmp_path)


def test_save_of_no_known_model(tmp_path):
    config = dataclasses.replace(decoder.SMALL, output_bias=True)
    params = decoder.init(jax.random.key(0), config)
    with pytest.raises(ValueError, match="no supported model has qkv_bias=False"):
        decoder_checkpoint.save(tmp_path, config, params)
    with pytest.raises(ValueError, match="decoder: params has"):
        decoder_checkpoint.save(tmp_path, decoder.SMALL, params)
