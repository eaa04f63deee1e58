"""Models of packages. Each is trained as the package's documentation or examples do it."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.others.program import Program, cast, filled, normal, program, tokens

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class _OlderNumpy:
    """``jax.numpy`` with names of arguments that newer ones do not have."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def clip(self, x, a_max):
        return jnp.clip(x, max=a_max)

    def reshape(self, x, shape=None, newshape=None):
        return jnp.reshape(x, newshape if shape is None else shape)


def _transformers(cls, config, dtype):
    """A model of transformers without parameters, and its parameters."""
    model = cls(config, dtype=dtype, _do_init=False)
    init = functools.partial(model.init_weights, input_shape=model.input_shape)
    return model, filled(init, jax.random.key(0))


def _next_token_loss(model):
    """That of `run_clm_flax.py`, of a model of transformers."""
    from flax.training.common_utils import onehot

    def loss(params, numbers):
        logits = model(numbers, params=params, train=True, dropout_rng=jax.random.key(0))[0]
        labels = onehot(numbers[..., 1:], logits.shape[-1])
        return optax.softmax_cross_entropy(logits[..., :-1, :], labels).mean()

    return loss


@program("transformers BERT")
def bert(tiny, dtype):
    import transformers
    from flax.training.common_utils import onehot

    size = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    more = size | dict(vocab_size=200) if tiny else dict(num_hidden_layers=6)
    config = transformers.BertConfig(**more)
    model, params = _transformers(transformers.FlaxBertForMaskedLM, config, dtype)
    shape = (2, 16) if tiny else (32, 512)
    numbers = tokens(shape, config.vocab_size)
    lengths = tokens(shape[:1], shape[1] // 2, 1) + shape[1] // 2
    mask = (jnp.arange(shape[1]) < lengths[:, None]).astype(jnp.int32)
    chosen = (tokens(shape, 100, 2) < 15) & (mask > 0)
    labels = jnp.where(chosen, numbers, -100)

    def loss(params, numbers, mask, labels, key, train=True):
        logits = model(numbers, mask, params=params, dropout_rng=key, train=train)[0]
        weights = jnp.where(labels > 0, 1.0, 0.0)
        losses = optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])) * weights
        return losses.sum() / weights.sum()

    evaluation = functools.partial(loss, train=False)
    batch = (numbers, mask, labels, jax.random.key(3))
    return Program(params, batch, loss, evaluation, dropout=True)


@program("transformers GPT-2")
def gpt2(tiny, dtype):
    import transformers

    size = dict(n_layer=1, n_embd=64, n_head=2, vocab_size=200)
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.GPT2Config(**(size if tiny else dict(n_layer=6)), **off)
    model, params = _transformers(transformers.FlaxGPT2LMHeadModel, config, dtype)
    numbers = tokens((2, 16) if tiny else (8, 1024), config.vocab_size)

    return Program(params, (numbers,), _next_token_loss(model))


@program("transformers T5")
def t5(tiny, dtype):
    import transformers
    from flax.training.common_utils import onehot
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = _OlderNumpy()
    size = dict(d_model=64, d_kv=32, d_ff=128, num_heads=2, num_layers=1, vocab_size=200)
    base = dict(d_model=768, d_ff=2048, num_heads=12, num_layers=4, vocab_size=32128)
    of_v1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0)
    config = transformers.T5Config(**(size if tiny else base), **of_v1_1)
    model, params = _transformers(transformers.FlaxT5ForConditionalGeneration, config, dtype)
    inputs = tokens((2, 16) if tiny else (16, 512), config.vocab_size)
    labels = tokens((2, 8) if tiny else (16, 114), config.vocab_size, 1)

    def loss(params, inputs, labels):
        shifted = jnp.roll(labels, 1, -1).at[:, 0].set(0)
        more = dict(params=params, train=True, dropout_rng=jax.random.key(0))
        logits = model(inputs, decoder_input_ids=shifted, **more)[0]
        return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()

    return Program(params, (inputs, labels), loss)


@program("transformers BART")
def bart(tiny, dtype):
    import transformers
    from flax.training.common_utils import onehot

    width, heads, inner, vocabulary = (64, 2, 128, 200) if tiny else (768, 12, 3072, 50265)
    sizes = {"layers": 1 if tiny else 4, "attention_heads": heads, "ffn_dim": inner}
    both = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
    config = transformers.BartConfig(d_model=width, vocab_size=vocabulary, dropout=0.1, **both)
    model, params = _transformers(transformers.FlaxBartForConditionalGeneration, config, dtype)
    inputs = tokens((2, 16) if tiny else (16, 512), vocabulary)
    labels = tokens((2, 8) if tiny else (16, 128), vocabulary, 1)
    labels = jnp.where(jnp.arange(labels.shape[1]) < labels.shape[1] - 2, labels, 1)  # padding

    def loss(params, inputs, labels, key, train=True):
        shifted = jnp.roll(labels, 1, -1).at[:, 0].set(2)
        more = dict(params=params, train=train, dropout_rng=key)
        logits = model(inputs, decoder_input_ids=shifted, **more)[0]
        smoothing, size = 0.1, logits.shape[-1]
        confidence, low = 1.0 - smoothing, smoothing / (size - 1)
        constant = confidence * jnp.log(confidence) + (size - 1) * low * jnp.log(low + 1e-20)
        soft = onehot(labels, size, on_value=confidence, off_value=low)
        losses = optax.softmax_cross_entropy(logits, soft) + constant
        inside = labels != 1
        return (losses * inside).sum() / inside.sum()

    evaluation = functools.partial(loss, train=False)
    return Program(params, (inputs, labels, jax.random.key(3)), loss, evaluation, dropout=True)


@program("transformers Llama")
def llama(tiny, dtype):
    import transformers

    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=200)
    large = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, vocab_size=32000)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    heads = heads if tiny else dict(num_attention_heads=16, num_key_value_heads=4)
    config = transformers.LlamaConfig(**(small if tiny else large), **heads)
    model, params = _transformers(transformers.FlaxLlamaForCausalLM, config, dtype)
    numbers = tokens((2, 16) if tiny else (4, 2048), config.vocab_size)

    return Program(params, (numbers,), _next_token_loss(model))


@program("transformers ViT")
def vit(tiny, dtype):
    import transformers
    from flax.training.common_utils import onehot

    size = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    more = size | dict(image_size=32) if tiny else dict(num_hidden_layers=6)
    config = transformers.ViTConfig(**more, num_labels=10 if tiny else 1000)
    model, params = _transformers(transformers.FlaxViTForImageClassification, config, dtype)
    images = normal((2 if tiny else 64, config.image_size, config.image_size, 3))
    images = images.transpose(0, 3, 1, 2)
    labels = tokens(images.shape[:1], config.num_labels)

    def loss(params, images, labels):
        logits = model(images, params=params, train=True, dropout_rng=jax.random.key(0)).logits
        return optax.softmax_cross_entropy(logits, onehot(labels, logits.shape[-1])).mean()

    def forward(params, images, labels):
        logits = model(images, params=params, train=False).logits
        return (jnp.argmax(logits, -1) == labels).mean(), jax.nn.softmax(logits)

    return Program(params, (images, labels), loss, forward)


@program("transformers CLIP")
def clip(tiny, dtype):
    import transformers

    size = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    text, vision = (size | dict(vocab_size=200), size | dict(image_size=64)) if tiny else ({}, {})
    text |= {} if tiny else dict(num_hidden_layers=6)
    vision |= {} if tiny else dict(num_hidden_layers=6)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    model, params = _transformers(transformers.FlaxCLIPModel, config, dtype)
    count, pixels = (4, 64) if tiny else (128, 224)
    numbers = tokens((count, 77), config.text_config.vocab_size)
    images = normal((count, 3, pixels, pixels))

    def cross_entropy(logits, axis):
        return -jnp.diag(jax.nn.log_softmax(logits, axis=axis)).mean()

    def loss(params, numbers, images):
        more = dict(params=params, train=True, dropout_rng=jax.random.key(0))
        similarity = model(numbers, images, jnp.ones_like(numbers), **more).logits_per_image
        return (cross_entropy(similarity, 0) + cross_entropy(similarity, 1)) / 2

    return Program(params, (numbers, images), loss)


@program("diffusers U-Net")
def unet(tiny, dtype):
    import diffusers

    widths, size, batch = ((32, 64), 8, 2) if tiny else ((192, 384, 576), 32, 16)
    names = ["CrossAttn"] * (len(widths) - 1) + [""]
    model = diffusers.FlaxUNet2DConditionModel(
        sample_size=size,
        down_block_types=tuple(f"{name}DownBlock2D" for name in names),
        up_block_types=tuple(f"{name}UpBlock2D" for name in reversed(names)),
        block_out_channels=widths,
        layers_per_block=1 if tiny else 2,
        cross_attention_dim=32 if tiny else 768,
        attention_head_dim=8,
        dtype=dtype,
    )
    params = filled(model.init_weights, jax.random.key(0))
    latents, noise = (normal((batch, 4, size, size), seed=seed) for seed in range(2))
    times = tokens((batch,), 1000)
    text = normal((batch, 77, 32 if tiny else 768), seed=2)

    def loss(params, latents, noise, times, text):
        alpha = jnp.cos(times / 1000 * jnp.pi / 2)[:, None, None, None]
        noisy = alpha * latents + jnp.sqrt(1 - alpha**2) * noise
        predicted = model.apply({"params": params}, noisy, times, text, train=True).sample
        return ((noise - predicted) ** 2).mean()

    def forward(params, latents, noise, times, text):
        return model.apply({"params": params}, noise, times, text).sample

    return Program(params, (latents, noise, times, text), loss, forward)


@program("diffusers VAE")
def vae(tiny, dtype):
    import diffusers

    widths, size, batch = ((32, 64), 16, 2) if tiny else ((64, 128, 256), 128, 8)
    model = diffusers.FlaxAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1 if tiny else 2,
        sample_size=size,
        dtype=dtype,
    )
    params = filled(model.init_weights, jax.random.key(0))
    images = normal((batch, 3, size, size))

    def loss(params, images, key):
        given = {"params": params}
        latent = model.apply(given, images, method=model.encode).latent_dist
        decoded = model.apply(given, latent.sample(key), method=model.decode).sample
        return ((decoded - images) ** 2).mean() + 1e-6 * latent.kl().mean()

    def forward(params, images, key):
        return model.apply({"params": params}, images).sample

    return Program(params, (images, jax.random.key(3)), loss, forward)


@program("flaxmodels GPT-2")
def flaxmodels_gpt2(tiny, dtype):
    import types

    import flaxmodels.gpt2.gpt2 as gpt2

    config = types.SimpleNamespace(
        vocab_size=200 if tiny else 50257,
        n_positions=1024,
        n_ctx=1024,
        n_inner=None,
        n_embd=64 if tiny else 768,
        n_head=2 if tiny else 12,
        n_layer=1 if tiny else 6,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
        scale_attn_weights=True,
    )
    gpt2.jnp = _OlderNumpy()

    class Model(gpt2.GPT2LMHeadModel):
        param_dict = None  # which the package sets only for a pretrained model

    model = Model(config)
    numbers = tokens((2, 16) if tiny else (4, 1024), config.vocab_size)
    params = filled(model.init, jax.random.key(0), numbers)["params"]

    def loss(params, numbers):
        logits = model.apply({"params": cast(params, dtype)}, numbers)["logits"][:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, numbers[:, 1:])
        return losses.astype(jnp.float32).mean()

    return Program(params, (numbers,), loss)


def _images(tiny: bool, count: int, size: int = 224, first: bool = False):
    """Images with channels last, or first, and labels."""
    count, size, classes = (2, 32, 10) if tiny else (count, size, 1000)
    shape = (count, 3, size, size) if first else (count, size, size, 3)
    return normal(shape), tokens((count,), classes)


def _label_loss(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


@program("jax_resnet ResNet-50")
def jax_resnet_50(tiny, dtype):
    import jax_resnet

    images, labels = _images(tiny, 64)
    classes = 10 if tiny else 1000
    net = jax_resnet.ResNet18 if tiny else jax_resnet.ResNet50
    model = net(n_classes=classes)
    variables = filled(model.init, jax.random.key(0), images)

    def loss(params, rest, images, labels):
        given = cast({"params": params}, dtype) | {"batch_stats": rest}
        logits, changed = model.apply(given, images.astype(dtype), mutable=["batch_stats"])
        return _label_loss(logits, labels), changed["batch_stats"]

    def forward(params, rest, images, labels):
        given = cast({"params": params, "batch_stats": rest}, dtype)
        return jax.nn.softmax(model.apply(given, images.astype(dtype), mutable=False))

    params, rest = variables["params"], variables["batch_stats"]
    return Program(params, (images, labels), loss, forward, rest, optax.sgd(0.1, 0.9))


def _equinox_classifier(model, batch, dtype):
    """A model of one image in ``dtype``, with float32 parameters."""
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params, images, train):
        model = eqx.combine(cast(params, dtype), static)
        keys = jax.random.split(jax.random.PRNGKey(0), len(images))
        of_one = functools.partial(model, inference=not train)
        return jax.vmap(of_one)(images.astype(dtype), keys)

    def loss(params, images, labels):
        return _label_loss(logits(params, images, True), labels)

    def forward(params, images, labels):
        return jax.nn.softmax(logits(params, images, False))

    return Program(params, batch, loss, forward)


@program("equimo ViT")
def equimo_vit(tiny, dtype):
    import equinox as eqx
    from equimo import models

    images, labels = _images(tiny, 64, first=True)
    size = dict(img_size=32, dim=64, num_heads=2, depths=[1], num_classes=10)
    build = functools.partial(models.vit_small_patch16_224, **(size if tiny else {}))
    return _equinox_classifier(
        eqx.filter_jit(build)(key=jax.random.PRNGKey(0)), (images, labels), dtype
    )


@program("equimo ConvNeXt")
def equimo_convnext(tiny, dtype):
    import equinox as eqx
    from equimo import models

    images, labels = _images(tiny, 32, first=True)
    size = dict(depths=[1, 1, 1, 1], dims=[32, 32, 64, 64], num_classes=10)
    build = functools.partial(models.convnext_t, **(size if tiny else {}))
    return _equinox_classifier(
        eqx.filter_jit(build)(key=jax.random.PRNGKey(0)), (images, labels), dtype
    )


@program("jaxonmodels Swin")
def swin(tiny, dtype):
    import equinox as eqx
    from jaxonmodels.models import swin_transformer as swin

    images, labels = _images(tiny, 32, first=True)
    make = functools.partial(
        swin._swin_transformer,
        inference=True,  # its attention has no key; all rates are zero
        num_classes=10 if tiny else 1000,
        patch_size=[4, 4],
        embed_dim=48 if tiny else 96,
        depths=[2] if tiny else [2, 2, 6, 2],
        num_heads=[3] if tiny else [3, 6, 12, 24],
        window_size=[4, 4] if tiny else [7, 7],
        stochastic_depth_prob=0.0,
        block=swin.SwinTransformerBlock,
        downsample_layer=swin.PatchMerging,
        attn_layer=swin.ShiftedWindowAttention,
    )
    model, state = make(jax.random.PRNGKey(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params, images):
        model = eqx.combine(cast(params, dtype), static)
        keys = jax.random.split(jax.random.PRNGKey(0), len(images))

        def of_one(image, key):
            return model(image, state, key)[0]

        return jax.vmap(of_one)(images.astype(dtype), keys)

    def loss(params, images, labels):
        return _label_loss(logits(params, images), labels)

    def forward(params, images, labels):
        return jax.nn.softmax(logits(params, images))

    return Program(params, (images, labels), loss, forward)


def _equinox_with_state(model, state, batch, dtype):
    """A model of one image whose batch norms are those of the mapped axis ``"batch"``."""
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)
    axes = dict(axis_name="batch", in_axes=(0, None), out_axes=(0, None))

    def loss(params, state, images, labels):
        model = eqx.combine(cast(params, dtype), static)
        logits, state = jax.vmap(model, **axes)(images.astype(dtype), state)
        return _label_loss(logits, labels), state

    def forward(params, state, images, labels):
        model = eqx.nn.inference_mode(eqx.combine(cast(params, dtype), static))
        logits, _ = jax.vmap(model, **axes)(images.astype(dtype), cast(state, dtype))
        return jax.nn.softmax(logits)

    return Program(params, batch, loss, forward, state)


@program("jaxonmodels ResNet")
def jaxon_resnet(tiny, dtype):
    from jaxonmodels.models import resnet

    images, labels = _images(tiny, 64, first=True)
    model, state = resnet._resnet18(jax.random.PRNGKey(0), 10 if tiny else 1000)
    return _equinox_with_state(model, state, (images, labels), dtype)


@program("equinox mixer")
def mixer(tiny, dtype):
    """https://docs.kidger.site/equinox/examples/score_based_diffusion/"""
    import einops
    import equinox as eqx

    batch, size, patch, hidden, mix_patch, mix_hidden, blocks = (
        (2, 8, 4, 32, 64, 64, 1) if tiny else (256, 28, 4, 64, 512, 512, 4)
    )

    class MixerBlock(eqx.Module):
        patch_mixer: eqx.nn.MLP
        hidden_mixer: eqx.nn.MLP
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm

        def __init__(self, patches, *, key):
            keys = jax.random.split(key)
            self.patch_mixer = eqx.nn.MLP(patches, patches, mix_patch, depth=1, key=keys[0])
            self.hidden_mixer = eqx.nn.MLP(hidden, hidden, mix_hidden, depth=1, key=keys[1])
            self.norm1 = eqx.nn.LayerNorm((hidden, patches))
            self.norm2 = eqx.nn.LayerNorm((patches, hidden))

        def __call__(self, y):
            y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
            y = einops.rearrange(y, "c p -> p c")
            y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
            return einops.rearrange(y, "p c -> c p")

    class Mixer2d(eqx.Module):
        conv_in: eqx.nn.Conv2d
        conv_out: eqx.nn.ConvTranspose2d
        blocks: list
        norm: eqx.nn.LayerNorm

        def __init__(self, *, key):
            patches = (size // patch) ** 2
            keys = jax.random.split(key, blocks + 2)
            self.conv_in = eqx.nn.Conv2d(2, hidden, patch, stride=patch, key=keys[0])
            self.conv_out = eqx.nn.ConvTranspose2d(hidden, 1, patch, stride=patch, key=keys[1])
            self.blocks = [MixerBlock(patches, key=key) for key in keys[2:]]
            self.norm = eqx.nn.LayerNorm((hidden, patches))

        def __call__(self, t, y):
            t = einops.repeat(t, "-> 1 h w", h=size, w=size)
            y = self.conv_in(jnp.concatenate([y, t]))
            _, height, width = y.shape
            y = einops.rearrange(y, "c h w -> c (h w)")
            for block in self.blocks:
                y = block(y)
            y = einops.rearrange(self.norm(y), "c (h w) -> c h w", h=height, w=width)
            return self.conv_out(y)

    model = eqx.filter_jit(Mixer2d)(key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    images = normal((batch, 1, size, size))
    times = jax.random.uniform(jax.random.key(1), (batch,), minval=0.1, maxval=10.0)

    def single_loss(model, image, t, key):
        mean, std = image * jnp.exp(-0.5 * t), jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
        noise = jax.random.normal(key, image.shape)
        predicted = model(t.astype(dtype), (mean + std * noise).astype(dtype))
        return (1 - jnp.exp(-t)) * jnp.mean((predicted + noise / std) ** 2)

    def loss(params, images, times, key):
        model = eqx.combine(cast(params, dtype), static)
        keys = jax.random.split(key, len(images))
        losses = jax.vmap(functools.partial(single_loss, model))(images, times, keys)
        return losses.mean()

    return Program(params, (images, times, jax.random.key(2)), loss)


@program("equinox CNN")
def equinox_cnn(tiny, dtype):
    """https://docs.kidger.site/equinox/examples/stateful/"""
    import equinox as eqx

    widths = (8, 16) if tiny else (64, 128, 256, 512)
    images, labels = _images(tiny, 256, 64, first=True)

    class Model(eqx.Module):
        convolutions: list
        norms: list
        linear: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, len(widths) + 1)
            pairs = zip((3, *widths), widths, strict=False)
            self.convolutions = [
                eqx.nn.Conv2d(*pair, 3, stride=2, padding=1, key=k)
                for pair, k in zip(pairs, keys[1:], strict=True)
            ]
            self.norms = [eqx.nn.BatchNorm(w, axis_name="batch", mode="batch") for w in widths]
            self.linear = eqx.nn.Linear(widths[-1], 10 if tiny else 1000, key=keys[0])

        def __call__(self, x, state):
            for convolution, norm in zip(self.convolutions, self.norms, strict=True):
                x, state = norm(convolution(x.astype(convolution.weight.dtype)), state)
                x = jax.nn.relu(x)
            return self.linear(x.mean((1, 2)).astype(self.linear.weight.dtype)), state

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    return _equinox_with_state(model, state, (images, labels), dtype)


@program("haiku ResNet-50")
def haiku_resnet(tiny, dtype):
    """https://github.com/google-deepmind/dm-haiku/tree/main/examples/imagenet"""
    import haiku as hk
    import jmp

    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
    images, labels = _images(tiny, 64)
    classes = 10 if tiny else 1000
    net = hk.nets.ResNet18 if tiny else hk.nets.ResNet50

    def apply(images, train):
        hk.mixed_precision.set_policy(net, policy)
        hk.mixed_precision.set_policy(hk.BatchNorm, jmp.Policy(*[jnp.float32] * 2, dtype))
        return net(classes, resnet_v2=True)(images, is_training=train)

    model = hk.without_apply_rng(hk.transform_with_state(apply))
    init = functools.partial(model.init, train=True)
    params, state = jax.jit(init)(jax.random.key(0), images)

    def loss(params, state, images, labels):
        logits, state = model.apply(params, state, images, train=True)
        one_hot = jax.nn.one_hot(labels, classes)
        one_hot = one_hot * 0.9 + 0.1 / classes  # label smoothing
        losses = optax.softmax_cross_entropy(logits, one_hot)
        weights = [p for (m, n), p in _flat(params) if "batchnorm" not in m and n == "w"]
        return losses.mean() + 1e-4 * 0.5 * sum(jnp.sum(jnp.square(w)) for w in weights), state

    def forward(params, state, images, labels):
        logits, _ = model.apply(params, state, images, train=False)
        return (jnp.argmax(logits, -1) == labels).astype(jnp.float32).sum()

    return Program(params, (images, labels), loss, forward, state, optax.sgd(0.1, 0.9, True))


def _flat(params):
    """Haiku's parameters by module and name."""
    return [((m, n), p) for m, group in params.items() for n, p in group.items()]


@program("haiku transformer")
def haiku_transformer(tiny, dtype):
    """https://github.com/google-deepmind/dm-haiku/tree/main/examples/transformer"""
    import haiku as hk

    width, heads, layers, vocabulary = (64, 2, 1, 200) if tiny else (512, 8, 6, 32000)
    numbers = tokens((2, 17) if tiny else (16, 513), vocabulary, 0)

    def norm(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def net(numbers):
        length = numbers.shape[1]
        init = hk.initializers.VarianceScaling(2 / layers)
        embed = hk.initializers.TruncatedNormal(stddev=0.02)
        x = hk.Embed(vocabulary, width, w_init=embed)(numbers)
        x = x + hk.get_parameter("positions", [length, width], init=embed)
        x = x.astype(dtype)
        padding = (numbers > 0)[:, None, None, :]
        mask = padding * np.tril(np.ones((1, 1, length, length)))
        for _ in range(layers):
            h = norm(x)
            x = x + hk.MultiHeadAttention(heads, width // heads, w_init=init)(h, h, h, mask=mask)
            h = hk.Linear(4 * width, w_init=init)(norm(x))
            x = x + hk.Linear(width, w_init=init)(jax.nn.gelu(h))
        return hk.Linear(vocabulary)(norm(x))

    model = hk.without_apply_rng(hk.transform(net))
    params = filled(model.init, jax.random.key(0), numbers[:, :-1])

    def loss(params, numbers):
        inputs, targets = numbers[:, :-1], numbers[:, 1:]
        logits = model.apply(cast(params, dtype), inputs)
        mask = jnp.greater(inputs, 0)
        log_likelihood = jnp.sum(
            jax.nn.one_hot(targets, vocabulary) * jax.nn.log_softmax(logits), axis=-1
        )
        return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)

    return Program(params, (numbers,), loss)


def _keras(model, batch, loss_of):
    """A loop on JAX as https://keras.io/guides/writing_a_custom_training_loop_in_jax/ has it."""
    trained = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]

    def loss(params, rest, x, y):
        predictions, rest = model.stateless_call(params, rest, x, training=True)
        return loss_of(y, predictions), rest

    def forward(params, rest, x, y):
        predictions, _ = model.stateless_call(params, rest, x, training=False)
        return predictions

    return Program(trained, batch, loss, forward, rest)


@program("keras EfficientNetV2")
def efficientnet(tiny, dtype):
    import keras

    images, labels = _images(tiny, 64)
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16" if dtype != jnp.float32 else "float32")
    model = keras.applications.EfficientNetV2B0(
        weights=None,
        input_shape=images.shape[1:],
        classes=10 if tiny else 1000,
        classifier_activation=None,
        include_preprocessing=False,
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _keras(model, (images, labels), loss_of)


@program("keras transformer")
def keras_transformer(tiny, dtype):
    """https://keras.io/examples/nlp/text_classification_with_transformer/"""
    import keras
    from keras import layers, ops

    width, heads, inner, depth, vocabulary = (
        (32, 2, 32, 1, 200) if tiny else (512, 8, 2048, 4, 20000)
    )
    shape = (2, 16) if tiny else (64, 256)
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16" if dtype != jnp.float32 else "float32")
    inputs = layers.Input(shape=shape[1:], dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    x = x + layers.Embedding(shape[1], width)(ops.arange(shape[1]))
    for _ in range(depth):
        attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization(epsilon=1e-6)(x + attended)
        h = layers.Dense(width)(layers.Dense(inner, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-6)(x + h)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(20, activation="relu")(x)
    outputs = layers.Dense(2, activation="softmax", dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    batch = (tokens(shape, vocabulary), tokens(shape[:1], 2, 1))
    return _keras(model, batch, keras.losses.SparseCategoricalCrossentropy())


@program("flax lm1b")
def lm1b(tiny, dtype):
    """https://github.com/google/flax/tree/main/examples/lm1b"""
    from flax import linen as nn
    from flax.training import common_utils

    width, heads, inner, layers, vocabulary = (
        (64, 2, 128, 1, 200) if tiny else (512, 8, 2048, 6, 30000)
    )
    inputs = tokens((2, 16) if tiny else (64, 256), vocabulary - 1) + 1
    targets = jnp.roll(inputs, -1, 1)
    of = dict(dtype=dtype)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            h = nn.LayerNorm(**of)(x)
            h = nn.MultiHeadDotProductAttention(
                heads,
                use_bias=False,
                kernel_init=nn.initializers.xavier_uniform(),
                bias_init=nn.initializers.normal(stddev=1e-6),
                **of,
            )(h, mask=mask)
            x = x + h
            h = nn.relu(nn.Dense(inner, **of)(nn.LayerNorm(**of)(x)))
            return x + nn.Dense(width, **of)(h)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, numbers):
            embed = nn.Embed(vocabulary, width, embedding_init=nn.initializers.normal(stddev=1.0))
            x = embed(numbers)
            place, rate = np.arange(x.shape[1])[:, None], np.arange(0, width, 2) / width
            angle = place / 10000.0**rate
            x = x + np.concatenate([np.sin(angle), np.cos(angle)], -1).astype(np.float32)
            x = x.astype(dtype)
            mask = nn.combine_masks(
                nn.make_attention_mask(numbers > 0, numbers > 0, **of),
                nn.make_causal_mask(numbers, **of),
            )
            for _ in range(layers):
                x = Block()(x, mask)
            x = nn.LayerNorm(**of)(x)
            return embed.attend(x.astype(jnp.float32)) / np.sqrt(width)

    model = Decoder()
    params = filled(model.init, jax.random.key(0), inputs)["params"]

    def loss(params, inputs, targets, smoothing=0.0):
        logits = model.apply({"params": params}, inputs)
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        confidence = 1.0 - smoothing
        low = (1.0 - confidence) / (vocabulary - 1)
        constant = -(
            confidence * jnp.log(confidence) + (vocabulary - 1) * low * jnp.log(low + 1e-20)
        )
        soft = common_utils.onehot(targets, vocabulary, on_value=confidence, off_value=low)
        losses = -jnp.sum(soft * nn.log_softmax(logits), axis=-1) - constant
        return (losses * weights).sum() / weights.sum()

    return Program(params, (inputs, targets), loss)


@program("flax U-Net")
def flax_unet(tiny, dtype):
    """The network of Stable Diffusion, with two resolutions and fewer channels."""
    from flax import linen as nn

    batch, size, first, second, groups = (2, 8, 32, 64, 8) if tiny else (16, 32, 160, 320, 32)
    of = dict(dtype=dtype)
    norm = functools.partial(nn.GroupNorm, groups, epsilon=1e-5, **of)

    def conv(x, width, kernel=3, stride=1):
        return nn.Conv(width, (kernel, kernel), (stride, stride), **of)(x)

    class Residual(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, time):
            h = conv(nn.silu(norm()(x)), self.width)
            h = h + nn.Dense(self.width, **of)(nn.silu(time))[:, None, None]
            h = conv(nn.silu(norm()(h)), self.width)
            return h + (x if x.shape == h.shape else conv(x, self.width, 1))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, x, text):
            width = x.shape[-1]
            h = conv(norm()(x), width, 1).reshape(batch, -1, width)
            for context in (None, text):
                y = nn.LayerNorm(**of)(h)
                attention = nn.MultiHeadDotProductAttention(8, use_bias=False, **of)
                h = h + attention(y, y if context is None else context)
            up, gate = jnp.split(nn.Dense(8 * width, **of)(nn.LayerNorm(**of)(h)), 2, -1)
            h = h + nn.Dense(width, **of)(up * nn.gelu(gate))
            return x + conv(h.reshape(x.shape), width, 1)

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x, times, text):
            rates = np.exp(-np.log(10000) * np.arange(0, 1, 2 / first)).astype(np.float32)
            angles = times[:, None] * rates
            time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
            time = nn.Dense(4 * first, **of)(nn.silu(nn.Dense(4 * first, **of)(time)))
            x, text = conv(x, first), text.astype(dtype)
            before = [x]
            x = Residual(first)(x, time)
            before += [x, conv(x, first, stride=2)]
            x = Transformer()(Residual(second)(before[-1], time), text)
            before.append(x)
            x = Residual(second)(Transformer()(Residual(second)(x, time), text), time)
            for _ in range(2):
                x = Residual(second)(jnp.concatenate([x, before.pop()], -1), time)
                x = Transformer()(x, text)
            x = conv(jax.image.resize(x, (batch, size, size, second), "nearest"), second)
            for _ in range(2):
                x = Residual(first)(jnp.concatenate([x, before.pop()], -1), time)
            return conv(nn.silu(norm()(x)), 4).astype(jnp.float32)

    model = UNet()
    latents, noise = (normal((batch, size, size, 4), seed=seed) for seed in range(2))
    times, text = tokens((batch,), 1000), normal((batch, 77, 768), seed=2)
    params = filled(model.init, jax.random.key(0), latents, times, text)["params"]

    def loss(params, latents, noise, times, text):
        alpha = jnp.cos(times / 1000 * jnp.pi / 2)[:, None, None, None]
        noisy = alpha * latents + jnp.sqrt(1 - alpha**2) * noise
        predicted = model.apply({"params": params}, noisy, times, text)
        return ((noise - predicted) ** 2).mean()

    def forward(params, latents, noise, times, text):
        return model.apply({"params": params}, noise, times, text)

    return Program(params, (latents, noise, times, text), loss, forward)


@program("flax LSTM")
def lstm(tiny, dtype):
    """https://github.com/google/flax/tree/main/examples/sst2"""
    from flax import linen as nn

    width, hidden, vocabulary = (32, 32, 200) if tiny else (300, 512, 20000)
    shape = (4, 8) if tiny else (256, 48)
    numbers, labels = tokens(shape, vocabulary), tokens(shape[:1], 2, 1)
    lengths = tokens(shape[:1], shape[1] // 2, 2) + shape[1] // 2

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, numbers, lengths):
            x = nn.Embed(vocabulary, width, dtype=dtype)(numbers)
            forward, backward = (nn.RNN(nn.OptimizedLSTMCell(hidden, dtype=dtype)) for _ in "fb")
            x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
            h = nn.tanh(nn.Dense(hidden, dtype=dtype)(x))
            scores = nn.Dense(1, use_bias=False, dtype=dtype)(h)[..., 0]
            inside = jnp.arange(numbers.shape[1]) < lengths[:, None]
            scores = nn.softmax(jnp.where(inside, scores, -jnp.inf))
            x = jnp.einsum("bl,bld->bd", scores, x)
            return nn.Dense(1, dtype=jnp.float32)(nn.tanh(nn.Dense(hidden, dtype=dtype)(x)))

    model = Classifier()
    params = filled(model.init, jax.random.key(0), numbers, lengths)

    def loss(params, numbers, lengths, labels):
        logits = model.apply(params, numbers, lengths)[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32)).mean()

    return Program(params, (numbers, lengths, labels), loss)


def _nnx(model, batch, loss_of):
    """A program of a model of ``flax.nnx`` whose parameters alone change."""
    from flax import nnx

    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, *batch):
        return loss_of(nnx.merge(graph, params, rest), *batch)

    return Program(nnx.to_pure_dict(params), batch, loss)


@program("nnx GPT")
def nnx_gpt(tiny, dtype):
    from flax import nnx

    width, heads, layers, vocabulary = (64, 2, 1, 200) if tiny else (768, 12, 6, 50257)
    shape = (2, 16) if tiny else (8, 1024)
    of = dict(dtype=dtype, rngs=nnx.Rngs(0))

    class Block(nnx.Module):
        def __init__(self):
            self.norm1, self.norm2 = (nnx.LayerNorm(width, epsilon=1e-6, **of) for _ in "12")
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **of)
            self.up = nnx.Linear(width, 4 * width, **of)
            self.down = nnx.Linear(4 * width, width, **of)

        def __call__(self, x, mask):
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Decoder(nnx.Module):
        def __init__(self):
            self.tokens = nnx.Embed(vocabulary, width, **of)
            self.positions = nnx.Embed(shape[1], width, **of)
            self.blocks = nnx.List([Block() for _ in range(layers)])
            self.norm = nnx.LayerNorm(width, **of)
            self.head = nnx.Linear(width, vocabulary, use_bias=False, **of)

        def __call__(self, numbers):
            x = self.tokens(numbers) + self.positions(jnp.arange(numbers.shape[1]))
            mask = nnx.make_causal_mask(numbers)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    def loss(model, numbers):
        logits = model(numbers)[:, :-1]
        labels = numbers[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _nnx(Decoder(), (tokens(shape, vocabulary),), loss)


@program("attnax decoder")
def attnax_decoder(tiny, dtype):
    import attnax
    from flax import nnx

    config = attnax.TransformerConfig(
        vocab_size=200 if tiny else 32000,
        d_model=64 if tiny else 768,
        num_heads=4 if tiny else 12,
        num_kv_heads=2 if tiny else 4,
        num_layers=1 if tiny else 6,
        d_ff=128 if tiny else 2048,
        max_len=16 if tiny else 1024,
        dropout_rate=0.0,
        pos_emb_type="rope",
        ff_activation="swiglu",
        norm_type="rms",
    )
    numbers = tokens((2, 16) if tiny else (8, 1024), config.vocab_size)
    model = attnax.TransformerDecoder(nnx.Rngs(0), config)
    head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, rngs=nnx.Rngs(1))

    def loss(both, numbers):
        model, head = both
        logits = head(model(numbers, deterministic=True)[:, :-1])
        return _label_loss(logits, numbers[:, 1:])

    found = _nnx(nnx.List([model, head]), (numbers,), loss)
    return Program(found.params, found.batch, lambda p, *b: found.loss(cast(p, dtype), *b))


@program("palm_jax PaLM")
def palm(tiny, dtype):
    import equinox as eqx
    from palm_jax.palm_lite import PaLM

    sizes = dict(num_tokens=200, dim=64, depth=1, heads=2, dim_head=32, max_seq_len=16)
    large = dict(num_tokens=20000, dim=768, depth=6, heads=12, dim_head=64, max_seq_len=1024)
    numbers = tokens((2, 17) if tiny else (8, 1025), 200 if tiny else 20000)
    model = PaLM(**(sizes if tiny else large), key=jax.random.PRNGKey(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params = jax.tree.map(lambda p: 0.03 * p if p.ndim > 1 else p, params)  # its are of size 1

    def loss(params, numbers):
        inputs, labels = numbers[:, :-1], numbers[:, 1:]
        logits = jax.vmap(eqx.combine(cast(params, dtype), static))(inputs)
        logits = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0].mean()

    return Program(params, (numbers,), loss)


@program("mamba2_jax Mamba-2")
def mamba2(tiny, dtype):
    import mamba2_jax
    from flax import nnx

    large = dict(num_hidden_layers=4, vocab_size=32000)
    config = mamba2_jax.Mamba2Config.tiny() if tiny else mamba2_jax.Mamba2Config(**large)
    model = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    numbers = tokens((2, 32) if tiny else (4, 1024), config.vocab_size)
    found = _nnx(model, (numbers,), lambda model, numbers: model(numbers, labels=numbers)["loss"])
    return Program(
        found.params,
        found.batch,
        lambda p, *b: found.loss(cast(p, dtype), *b).astype(jnp.float32),
    )


@program("penzai GPT-NeoX")
def gpt_neox(tiny, dtype):
    from penzai import pz
    from penzai.models.transformer.variants import gpt_neox

    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=2 if tiny else 12,
        embedding_dim=64 if tiny else 768,
        projection_dim=32 if tiny else 64,
        mlp_hidden_dim=128 if tiny else 3072,
        num_decoder_blocks=1 if tiny else 6,
        vocab_size=200 if tiny else 50432,
        activation_fn="gelu_approx",
        rope_subset_size=8 if tiny else 16,
        rope_wavelength=10000.0,
        layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    build = functools.partial(gpt_neox.build_gpt_neox_transformer, config)
    model = jax.jit(lambda key: pz.freeze_params(build(key)))(jax.random.key(0))
    numbers = tokens((2, 16) if tiny else (8, 1024), config.vocab_size)

    def loss(model, numbers):
        named = pz.nx.wrap(numbers).tag("batch", "seq")
        logits = cast(model, dtype)(named).unwrap("batch", "seq", "vocabulary")
        return _label_loss(logits[:, :-1], numbers[:, 1:])

    return Program(model, (numbers,), loss)


@program("jraph graph network")
def graph_network(tiny, dtype):
    """https://github.com/google-deepmind/jraph/tree/master/jraph/ogb_examples"""
    import haiku as hk
    import jraph

    graphs, nodes, edges, width = (2, 8, 20, 16) if tiny else (64, 512, 2048, 128)

    def batch_of(seed):
        count, links = graphs * nodes, graphs * edges
        start = jnp.repeat(jnp.arange(graphs) * nodes, edges)
        ends = (start + tokens((links,), nodes, seed + i) for i in range(2))
        return jraph.GraphsTuple(
            nodes=normal((count, 16), seed=seed),
            edges=normal((links, 8), seed=seed + 1),
            globals=normal((graphs, 4), seed=seed + 2),
            senders=next(ends),
            receivers=next(ends),
            n_node=jnp.full(graphs, nodes),
            n_edge=jnp.full(graphs, edges),
        )

    def mlp(features):
        net = hk.Sequential(
            [hk.Linear(width), jax.nn.relu, hk.Linear(width), jax.nn.relu, hk.LayerNorm(-1, 1, 1)]
        )
        return net(features)

    updates = [jraph.concatenated_args(mlp) for _ in range(3)]

    def net(graph):
        names = ("update_edge_fn", "update_node_fn", "update_global_fn")
        cells = dict(zip(names, updates, strict=True))
        graph = jraph.GraphMapFeatures(*[hk.Linear(width) for _ in range(3)])(graph)
        for _ in range(1 if tiny else 4):
            new = jraph.GraphNetwork(**cells)(graph)
            graph = new._replace(nodes=graph.nodes + new.nodes, edges=graph.edges + new.edges)
        return hk.Linear(2)(graph.globals)

    model = hk.without_apply_rng(hk.transform(net))
    graph = batch_of(0)
    params = filled(model.init, jax.random.key(0), graph)
    labels = tokens((graphs,), 2, 5)

    def loss(params, graph, labels):
        given = graph._replace(nodes=graph.nodes.astype(dtype), edges=graph.edges.astype(dtype))
        given = given._replace(globals=graph.globals.astype(dtype))
        log_probabilities = jax.nn.log_softmax(model.apply(cast(params, dtype), given))
        return -jnp.mean(jax.nn.one_hot(labels, 2) * log_probabilities)

    return Program(params, (graph, labels), loss)


@program("jraphx GAT")
def gat(tiny, dtype):
    from flax import nnx
    from jraphx.nn.models import GAT

    nodes, edges, features, hidden, classes = (
        (20, 60, 16, 16, 4) if tiny else (20000, 200000, 128, 256, 40)
    )
    model = GAT(
        features, hidden, 2, classes, heads=4, norm="layer_norm", act=nnx.elu, rngs=nnx.Rngs(0)
    )
    model.train()
    x, links, labels = (
        normal((nodes, features)),
        tokens((2, edges), nodes),
        tokens((nodes,), classes),
    )

    def loss(model, x, links, labels):
        logits = model(x, links)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _nnx(model, (x, links, labels), loss)


@program("numpyro VAE")
def numpyro_vae(tiny, dtype):
    """https://num.pyro.ai/en/stable/examples/vae.html"""
    import numpyro
    import numpyro.distributions as dist
    from jax.example_libraries import stax
    from numpyro.infer import SVI, Trace_ELBO

    hidden, latent, count, size = (16, 4, 4, 28) if tiny else (1024, 64, 8192, 28)
    out = stax.Identity

    def encoder():
        both = stax.FanOut(2)
        mean = stax.Dense(latent, W_init=stax.randn())
        std = stax.serial(stax.Dense(latent, W_init=stax.randn()), stax.Exp)
        first = stax.serial(stax.Dense(hidden, W_init=stax.randn()), stax.Softplus)
        return stax.serial(first, both, stax.parallel(mean, std))

    def decoder():
        layers = stax.Dense(hidden, W_init=stax.randn()), stax.Softplus
        return stax.serial(*layers, stax.Dense(size * size, W_init=stax.randn()), stax.Sigmoid, out)

    def model(batch):
        batch = jnp.reshape(batch, (count, -1))
        decode = numpyro.module("decoder", decoder(), (count, latent))
        with numpyro.plate("batch", count):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([latent]).to_event(1))
            images = decode(z)
            return numpyro.sample("obs", dist.Bernoulli(images).to_event(1), obs=batch)

    def guide(batch):
        batch = jnp.reshape(batch, (count, -1))
        encode = numpyro.module("encoder", encoder(), (count, size * size))
        loc, std = encode(batch)
        with numpyro.plate("batch", count):
            return numpyro.sample("z", dist.Normal(loc, std).to_event(1))

    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    images = (normal((count, size, size)) > 0).astype(jnp.float32)
    state = svi.init(jax.random.PRNGKey(0), images)
    return Program(state, (images,), forward=svi.evaluate, update=svi.update)


@program("flowjax coupling flow")
def coupling_flow(tiny, dtype):
    import equinox as eqx
    from flowjax.distributions import StandardNormal
    from flowjax.flows import coupling_flow
    from flowjax.train.losses import MaximumLikelihoodLoss
    from paramax import NonTrainable

    dim, width, layers, count = (4, 16, 2, 8) if tiny else (64, 512, 8, 16384)
    flow = coupling_flow(
        jax.random.key(0),
        base_dist=StandardNormal((dim,)),
        nn_width=width,
        nn_depth=2,
        flow_layers=layers,
    )

    def frozen(leaf):
        return isinstance(leaf, NonTrainable)

    params, static = eqx.partition(flow, eqx.is_inexact_array, is_leaf=frozen)

    def loss(params, x):
        return MaximumLikelihoodLoss()(params, static, x)

    return Program(params, (normal((count, dim)),), loss, optimizer=optax.adam(5e-4))


@program("rlax actor-critic")
def actor_critic(tiny, dtype):
    import haiku as hk
    import rlax

    steps, actors, size, actions = (4, 2, 36, 4) if tiny else (20, 64, 84, 18)

    def net(frames):
        x = frames.astype(dtype) / 255.0
        torso = [hk.Conv2D(32, 8, 4), jax.nn.relu, hk.Conv2D(64, 4, 2), jax.nn.relu]
        torso += [hk.Conv2D(64, 3, 1), jax.nn.relu, hk.Flatten(), hk.Linear(512), jax.nn.relu]
        x = hk.Sequential(torso)(x)
        return hk.Linear(actions)(x), hk.Linear(1)(x)[..., 0]

    model = hk.without_apply_rng(hk.transform(net))
    frames = tokens(((steps + 1) * actors, size, size, 4), 256).astype(jnp.uint8)
    taken = tokens((steps, actors), actions, 1)
    rewards = normal((steps, actors), seed=2)
    discounts = 0.99 * (tokens((steps, actors), 20, 3) > 0)
    params = filled(model.init, jax.random.key(0), frames)

    def loss(params, frames, taken, rewards, discounts):
        logits, values = model.apply(cast(params, dtype), frames)
        logits = logits.reshape(steps + 1, actors, actions).astype(jnp.float32)[:-1]
        values = values.reshape(steps + 1, actors).astype(jnp.float32)

        def of_actor(logits, values, taken, rewards, discounts):
            advantages = rlax.td_lambda(values[:-1], rewards, discounts, values[1:], 0.95)
            weights = jnp.ones(steps)
            policy = rlax.policy_gradient_loss(
                logits, taken, jax.lax.stop_gradient(advantages), weights
            )
            entropy = rlax.entropy_loss(logits, weights)
            return policy + 0.01 * entropy + 0.5 * jnp.mean(jnp.square(advantages))

        losses = jax.vmap(of_actor, 1)(logits, values, taken, rewards, discounts)
        return losses.mean()

    def forward(params, frames, *others):
        logits, values = model.apply(cast(params, dtype), frames)
        return jax.nn.softmax(logits), values

    return Program(params, (frames, taken, rewards, discounts), loss, forward)


@program("diffrax neural ODE")
def neural_ode(tiny, dtype):
    """https://docs.kidger.site/diffrax/examples/neural_ode/"""
    import diffrax
    import equinox as eqx

    size, width, depth, count, length = (2, 16, 2, 4, 5) if tiny else (64, 512, 2, 4096, 20)

    class Func(eqx.Module):
        scale: jax.Array
        mlp: eqx.nn.MLP

        def __init__(self, *, key):
            self.scale = jnp.ones(())
            self.mlp = eqx.nn.MLP(
                size, size, width, depth, jax.nn.softplus, final_activation=jnp.tanh, key=key
            )

        def __call__(self, t, y, args):
            return self.scale * self.mlp(y)

    model = eqx.filter_jit(Func)(key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    times = jnp.linspace(0, 1, length)

    def solve(params, start):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(eqx.combine(params, static)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=1 / (length - 1),
            y0=start,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.ConstantStepSize(),
        )
        return solution.ys

    def forward(params, paths):
        return jax.vmap(functools.partial(solve, params))(paths[:, 0])

    def loss(params, paths):
        return jnp.mean((forward(params, paths) - paths) ** 2)

    optimizer = optax.adabelief(3e-3)
    return Program(params, (normal((count, length, size)),), loss, forward, optimizer=optimizer)


@program("e3nn_jax network")
def e3nn_network(tiny, dtype):
    """https://e3nn-jax.readthedocs.io/en/latest/tuto/message_passing.html"""
    import e3nn_jax as e3nn
    import flax.linen as nn

    nodes, edges, layers = (8, 20, 1) if tiny else (4096, 65536, 3)
    hidden = "8x0e + 4x1o" if tiny else "64x0e + 32x1o + 16x2e"

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, positions, senders, receivers):
            x = e3nn.flax.Linear(hidden, force_irreps_out=True)(x)
            relative = positions[receivers] - positions[senders]
            harmonics = e3nn.spherical_harmonics([1, 2], relative, True)
            messages = e3nn.concatenate(
                [x[senders], e3nn.tensor_product(x[senders], harmonics, filter_ir_out="0e+1o+2e")]
            )
            radial = e3nn.soft_one_hot_linspace(
                e3nn.norm(relative).array[..., 0],
                start=0.0,
                end=5.0,
                number=8,
                basis="smooth_finite",
                cutoff=True,
            )
            mix = e3nn.flax.MultiLayerPerceptron([64, messages.irreps.num_irreps], jax.nn.silu)
            messages = messages * mix(radial)
            y = e3nn.scatter_sum(messages, dst=receivers, output_size=len(positions)) / 4
            y = e3nn.flax.Linear(f"{hidden} + 16x0e")(y)
            y = e3nn.scalar_activation(y, [jax.nn.gelu] + [None] * (len(y.irreps) - 1))
            return e3nn.flax.Linear(hidden, force_irreps_out=True)(y) + x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, positions, senders, receivers):
            x = e3nn.IrrepsArray("1x0e", jnp.ones((len(positions), 1)))
            wrapped = e3nn.IrrepsArray("1o", positions)
            for _ in range(layers):
                x = Layer()(x, wrapped, senders, receivers)
            return e3nn.flax.Linear("8x0e")(x).array

    model = Net()
    positions = normal((nodes, 3))
    senders, receivers = tokens((edges,), nodes), tokens((edges,), nodes, 1)
    labels = tokens((nodes,), 8, 2)
    params = filled(model.init, jax.random.key(0), positions, senders, receivers)

    def loss(params, positions, senders, receivers, labels):
        logits = model.apply(params, positions, senders, receivers)
        return -jnp.mean(jax.nn.one_hot(labels, 8) * jax.nn.log_softmax(logits))

    return Program(params, (positions, senders, receivers, labels), loss)
