"""Programs that were not written for this package: models of packages, and plain workloads.

The list was chosen before the first measurement, except "flax U-Net", which came later. No program
is removed from it. A package that is not installed is left out of a run, and named there.
``packages`` and ``workloads`` have a function for each program; ``program`` says what it returns.
"""

# Models of packages, each with the loss, and where there is one with the training step, of the
# package or of its examples. Name -> the package that must be installed, and what it is.
PACKAGES = {
    "transformers BERT": ("transformers", "masked language model, loss of `run_mlm_flax.py`"),
    "transformers GPT-2": ("transformers", "language model, loss of `run_clm_flax.py`"),
    "transformers T5": ("transformers", "span corruption, loss of `run_t5_mlm_flax.py`"),
    "transformers BART": ("transformers", "label smoothing of `run_summarization_flax.py`"),
    "transformers Llama": ("transformers", "language model, loss of `run_clm_flax.py`"),
    "transformers ViT": ("transformers", "loss of `run_image_classification_flax.py`"),
    "transformers CLIP": ("transformers", "contrastive loss of `run_hybrid_clip.py`"),
    "diffusers U-Net": ("diffusers", "with cross attention, loss of `train_text_to_image_flax.py`"),
    "diffusers VAE": ("diffusers", "the autoencoder of Stable Diffusion, squared error and KL"),
    "flaxmodels GPT-2": ("flaxmodels", "language model, cross entropy of optax"),
    "jax_resnet ResNet-50": ("jax_resnet", "batch norm with running averages"),
    "equimo ViT": ("equimo", "ViT-S/16"),
    "equimo ConvNeXt": ("equimo", "ConvNeXt-T"),
    "jaxonmodels Swin": ("jaxonmodels", "Swin-T"),
    "jaxonmodels ResNet": ("jaxonmodels", "ResNet-18 with batch norm under `vmap`"),
    "equinox mixer": ("equinox", "the MLP-mixer of a documented diffusion example, and its loss"),
    "equinox CNN": ("equinox", "convolutions and batch norm under `vmap`, as in the documentation"),
    "haiku ResNet-50": ("haiku", "`hk.nets.ResNet50`, loss of its ImageNet example"),
    "haiku transformer": ("haiku", "the language model of its examples, with its loss"),
    "keras EfficientNetV2": ("keras", "`keras.applications`, a stateless loop on JAX"),
    "keras transformer": ("keras", "the text classifier of its examples"),
    "flax lm1b": ("flax", "the decoder of its examples, weighted loss of one-hot targets"),
    "flax U-Net": ("flax", "group norms, cross attention: Stable Diffusion with fewer channels"),
    "flax LSTM": ("flax", "the bidirectional LSTM of its text classification example"),
    "nnx GPT": ("flax", "a decoder of `nnx` layers"),
    "attnax decoder": ("attnax", "RMS norms, rotary embedding, grouped heads, SwiGLU"),
    "palm_jax PaLM": ("palm_jax", "parallel layers, ALiBi, one head of keys"),
    "mamba2_jax Mamba-2": ("mamba2_jax", "language model with its own loss"),
    "penzai GPT-NeoX": ("penzai", "named axes"),
    "jraph graph network": ("jraph", "MLPs with layer norms, sums over edges"),
    "jraphx GAT": ("jraphx", "graph attention"),
    "numpyro VAE": ("numpyro", "its own step, `SVI.update`"),
    "flowjax coupling flow": ("flowjax", "its own loss, maximum likelihood"),
    "rlax actor-critic": ("rlax", "its losses of policy, entropy and values on a CNN"),
    "diffrax neural ODE": ("diffrax", "the documented example"),
    "e3nn_jax network": ("e3nn_jax", "an equivariant message passing network"),
}

# Plain workloads in `jax.numpy`. Each has element-wise neighbours before and after an op.
WORKLOADS = {
    "layer norm, mean": "of a residual in bfloat16, cast, then the mean over tokens",
    "convolution, gelu, batch norm": "with a bias, in training",
    "softmax, top-k": "temperature and mask before it, top-k and renormalization after it",
    "attention, causal": "heads by einsum, dropout of none, output gate",
    "attention, window": "local causal attention in float32 softmax",
    "attention, segments": "packed sequences",
    "attention, ALiBi": "with slopes for each head",
    "attention, grouped": "rotary embedding, RMS norms of queries and keys, grouped heads",
    "SwiGLU": "RMS norm, gated MLP, residual",
    "GEGLU": "with biases, layer norm, scaled residual",
    "Llama layers": "a decoder by hand with a head `[d, v]`",
    "BERT layers": "an encoder by hand with dropout and padding",
    "loss, label smoothing": "a one-hot product, soft labels, weights of tokens",
    "loss, z-loss": "logsumexp squared, weights of tokens",
    "embeddings": "cast, gather, positions, layer norm, dropout",
    "MLP": "two hidden layers with biases and relu, weight decay in the loss",
    "U-Net block": "group norm, silu, convolution, time embedding, residual",
    "moving average": "a student and the moving average of its parameters",
    "logistic regression": "wide features, binary labels, L2",
    "contrastive loss": "normalized embeddings, temperature, both directions",
    "focal loss": "of dense class scores",
    "distillation": "KL of two softmaxes with a temperature, and the labels' loss",
    "RMS norm, reduction": "the norm of a sum goes to a dot product with a vector",
    "layer norm, sum": "the norm goes to a sum over tokens and a cast",
    "mixture of experts": "softmax of a router, top-2, capacity, load balance",
    "residual blocks": "convolutions, batch norm, relu of a sum",
    "convolution, pool": "bias and relu, local response normalization, max pool",
}
