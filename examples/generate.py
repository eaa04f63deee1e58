"""Continues a text by a decoder of Hugging Face, such as Llama or Qwen.

    pip install '.[train]'
    python examples/generate.py FOLDER "Once upon a time" --length 100 --temperature 0.7

FOLDER has ``config.json``, ``model.safetensors`` (or several files of tensors) and
``tokenizer.json``. ``hf download Qwen/Qwen3-0.6B --local-dir FOLDER`` makes one. A text ends at a
token that ``generation_config.json`` or ``config.json`` names.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax_fastops.models import decoder, decoder_checkpoint
from tokenizers import Tokenizer

import loop


def main(argv: Sequence[str] | None = None) -> int:
    parser = loop.parser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a decoder, such as Llama or Qwen")
    add("prompts", nargs="+", metavar="TEXT", help="texts to continue")
    add("--length", type=loop.positive, default=100, metavar="N", help="new tokens (default: 100)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0, no sampling)")
    add("--top-k", type=loop.positive, metavar="K", help="sample among K tokens (default: all)")
    add("--top-p", type=float, metavar="P", help="among those that add up to P (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32 on a CPU)")
    options = parser.parse_args(argv)
    if not options.temperature >= 0:
        loop.fail(parser, f"--temperature is {options.temperature}; it must be 0 or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        loop.fail(parser, f"--top-p is {options.top_p}; it must be above 0, and at most 1")
    if (options.top_k or options.top_p) and not options.temperature:
        loop.fail(parser, "--top-k and --top-p need --temperature")
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        loop.check_folder(options.folder, "decoder")
        config, params = decoder_checkpoint.load(options.folder, dtype=dtype, param_dtype=dtype)
        tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    except Exception as error:  # tokenizers has no class of errors
        loop.fail(parser, str(error).partition("\n")[0])
    print(f"{config.layers} layers, {dtype}, {jax.devices()[0].device_kind}", file=sys.stderr)

    tokenizer.enable_padding(direction="left")
    encoded = tokenizer.encode_batch(options.prompts)
    if not all(any(e.attention_mask) for e in encoded):
        loop.fail(parser, "TEXT: a text is empty, and the tokenizer adds no token")
    tokens = jnp.array([e.ids for e in encoded])
    mask = jnp.array([e.attention_mask for e in encoded], bool)
    sampling = {}
    if options.temperature:
        key = jax.random.key(options.seed)
        sampling = dict(key=key, temperature=options.temperature)
        sampling |= dict(top_k=options.top_k, top_p=options.top_p)
    generate = jax.jit(decoder.generate, static_argnames=("config", "length", "end", "top_k"))
    arguments = dict(length=options.length, mask=mask, end=ends(options.folder), **sampling)
    compiled = generate.lower(params, tokens, config, **arguments).compile()
    static = ("length", "end", "top_k")
    dynamic = {name: value for name, value in arguments.items() if name not in static}
    start = time.perf_counter()
    new, lengths = jax.tree.map(np.asarray, compiled(params, tokens, **dynamic))
    seconds = time.perf_counter() - start
    for prompt, e, ids, length in zip(options.prompts, encoded, new, lengths, strict=True):
        # Decoded together, because a decoder may remove the space before the first token.
        given = [token for token, kept in zip(e.ids, e.attention_mask, strict=True) if kept]
        text = tokenizer.decode(given + ids[:length].tolist())
        print(prompt + text[len(tokenizer.decode(given)) :])
    count = int(lengths.sum())
    print(f"{count} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def ends(folder: Path) -> tuple[int, ...] | None:
    """The tokens that end a text."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            if found is not None:
                return tuple(np.atleast_1d(found).tolist())
    return None


if __name__ == "__main__":
    sys.exit(main())
