"""Reads a model directory in Hugging Face's layout: its configuration and, memory-mapped, its weights."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine_v1.models.config import DecoderConfig
from engine_v1.models.gguf_checkpoint import convert_weights, is_converted_gguf
from engine_v1.models.registry import CausalLM, get_model_class, parse_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A network, and the weights that it is to have: a backend reads them, or what it needs of them."""

    model: CausalLM
    config: DecoderConfig
    dtype: torch.dtype
    directory: Path
    weights: "SafetensorsWeights"

    def read_weights(self) -> None:
        """Fill the network's tensors.

        Raises:
            FileNotFoundError: if a file is missing, naming it.
            ValueError: on truncated files, and on missing or unexpected tensors, naming them.
        """
        try:
            self.model.load_weights(self.weights)
        except ValueError as error:
            raise ValueError(f"{self.weights.current}: {error}") from error


def load_config(directory: Path) -> DecoderConfig:
    """Read config.json.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is no JSON, or describes something that is not supported.
    """
    path = directory / "config.json"
    hf = read_json(path)
    if hf is None:
        raise FileNotFoundError(f"{path} does not exist; a model directory holds config.json and *.safetensors")
    try:
        return parse_config(hf)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def load_generation_config(directory: Path) -> dict[str, Any]:
    """Return what generation_config.json says; where there is none, the EOS and BOS ids of config.json.

    Raises:
        ValueError: if the file is no JSON object.
    """
    given = read_json(directory / "generation_config.json")
    if given is not None:
        return given
    hf = read_json(directory / "config.json") or {}
    return {key: hf[key] for key in ("eos_token_id", "bos_token_id") if hf.get(key) is not None}


def open_model(directory: Path, config: DecoderConfig, *, dtype: str, device: torch.device) -> LoadedModel:
    """Build the network that `config` describes and find its weights, without reading them.

    Args:
        directory: in Hugging Face's layout, as `resolve_model` returns it.
        config: from :func:`load_config`.
        dtype: "auto", "float32", "bfloat16" or "float16"; see :func:`resolve_dtype`.
        device: where the weights go.

    Raises:
        FileNotFoundError: if there are no weights, or some are missing.
        ValueError: if a file is truncated or of another format.
    """
    weights = open_weights(directory, dtype, device)
    model = get_model_class([config.architecture])(config, dtype=weights.dtype, device=device)
    return LoadedModel(model, config, weights.dtype, directory, weights)


def load_model(directory: Path, config: DecoderConfig, *, dtype: str, device: torch.device) -> LoadedModel:
    """Build the network and read its weights; see :func:`open_model` and :meth:`LoadedModel.read_weights`."""
    loaded = open_model(directory, config, dtype=dtype, device=device)
    loaded.read_weights()
    return loaded


def resolve_dtype(dtype: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in.

    "auto" is the checkpoint's own, bfloat16 for a GGUF. float16 checkpoints become bfloat16 on the CPU, where kernels
    for float16 are slow or missing, and stay float16 elsewhere.

    Raises:
        ValueError: if the checkpoint's dtype is one that models are not computed in.
    """
    name = dtype
    if dtype == "auto":
        name = checkpoint_dtype.removeprefix("torch.")
        if name == "float16" and device.type == "cpu":
            name = "bfloat16"
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; use dtype='auto', {', '.join(map(repr, _DTYPES))}")
    return _DTYPES[name]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if there is no such file.

    Raises:
        ValueError: if it holds anything else, naming the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); is it truncated?") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return content


class SafetensorsWeights:
    """The tensors of some safetensors files by name, memory-mapped.

    Args:
        files: read in this order.
        dtype: what the model is to be computed in; the tensors come as they are stored.
    """

    def __init__(self, files: list[Path], dtype: torch.dtype) -> None:
        self.files = files
        self.dtype = dtype
        self.current = files[0] if len(files) == 1 else files[0].parent  # what is being read, for error messages

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor.

        Raises:
            FileNotFoundError: if a file is missing, naming it.
            ValueError: if one is truncated or of another format, naming it.
        """
        whole = self.current
        for path in self.files:
            self.current = path
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 it is no mapping
                    yield name, file.get_tensor(name)
        self.current = whole

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return one tensor, or None where there is none of that name."""
        for path in self.files:
            with open_safetensors(path) as file:
                if name in file.keys():  # noqa: SIM118 it is no mapping
                    tensor: torch.Tensor = file.get_tensor(name)
                    return tensor
        return None


def open_weights(directory: Path, dtype: str, device: torch.device) -> SafetensorsWeights:
    """Find a directory's weights and settle the dtype to compute in.

    Raises:
        FileNotFoundError: if there are none, or some are missing.
        ValueError: if one is truncated or of another format.
    """
    resolved = computed_dtype(directory, dtype, device)
    if is_converted_gguf(directory):
        return SafetensorsWeights([convert_weights(directory, resolved)], resolved)
    return SafetensorsWeights(_weight_files(directory), resolved)


def computed_dtype(directory: Path, dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype that :func:`open_model` computes in, without touching the weights if it can be helped.

    Raises:
        FileNotFoundError: if a file must be looked at, and there is none.
        ValueError: as :func:`resolve_dtype`.
    """
    hf = read_json(directory / "config.json") or {}
    checkpoint_dtype = hf.get("dtype") or hf.get("torch_dtype") or _stored_dtype(_weight_files(directory)[0])
    return resolve_dtype(dtype, checkpoint_dtype, device)


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is truncated or of another format.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; download the model again") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); download it again") from error


def _weight_files(directory: Path) -> list[Path]:
    index = read_json(directory / _INDEX)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ValueError(f"{directory / _INDEX} has no 'weight_map'")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / "model.safetensors").exists():
        files = [directory / "model.safetensors"]
    else:
        files = sorted(directory.glob("*.safetensors"))
        if len(files) > 1:
            raise ValueError(
                f"{directory} holds {len(files)} *.safetensors files and no {_INDEX} to tell what they hold"
            )
    if not files:
        others = ", ".join(sorted(p.name for p in directory.glob("*.bin"))) or "none of another format either"
        raise FileNotFoundError(f"{directory} holds no *.safetensors ({others}); convert the model to safetensors")
    for path in files:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist, {_INDEX} names it; download the model again")
    return files


def _stored_dtype(path: Path) -> str:
    """Return the dtype that most tensors of a file have."""
    with open_safetensors(path) as file:
        counts = Counter(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118 it is no mapping
    stored = counts.most_common(1)[0][0] if counts else "F32"
    return _SAFETENSORS_DTYPES.get(stored, stored)
