"""Converts a GGUF file, once, into a checkpoint in Hugging Face's layout."""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.paths import cache_root

logger = logging.getLogger(__name__)

_SOURCE_FILE = "gguf_source"  # in a converted directory: the path of the GGUF, for weights in further dtypes
_FORMAT_VERSION = 1  # of what is written; another number makes every file be converted anew

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"  # of the rotary frequencies, for Llama 3's stretched contexts
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def convert_gguf(path: Path) -> Path:
    """Return a directory with a GGUF's configuration and tokenizer; weights follow by :func:`convert_weights`.

    It lies in the cache directory, where a second start finds it; without a writable one, it is temporary.

    Raises:
        ValueError: if the file is truncated, no GGUF, or of an architecture or tokenizer that is not supported.
    """
    directory = _directory_for(path)
    if directory.is_dir():
        return directory
    reader = _open_gguf(path)
    try:
        facts = {name: field.contents() for name, field in reader.fields.items()}
        contents = _small_files(facts, reader, path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:  # a missing key, a vocabulary that the tokenizer library refuses
        raise ValueError(f"{path}: the metadata cannot be read ({type(error).__name__}: {error})") from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for name, content in contents.items():
            (temporary / name).write_text(content, encoding="utf-8")
        temporary.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was first, with the same content
            temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


@dataclass(frozen=True)
class GgufMatrix:
    """A matrix as its file stores it."""

    kind: str  # "Q4_1", "Q8_0", ...
    blocks: npt.NDArray[np.uint8]  # [outputs, num_blocks, block_bytes], q and k as Hugging Face orders their rows


def read_matrices(directory: Path) -> dict[str, GgufMatrix]:
    """Return the matrices of a converted directory's GGUF as blocks, by their names in Hugging Face's layout.

    Raises:
        FileNotFoundError: if the file is no longer there.
        ValueError: if it is damaged.
    """
    import gguf

    reader = _open_gguf(_source_of(directory, "its blocks"))
    hf = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    matrices = {}
    for tensor in reader.tensors:
        if len(tensor.shape) != 2:
            continue
        name, data = _hf_name(tensor.name), tensor.data
        block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        blocks = data.view(np.uint8).reshape(data.shape[0], -1, block_bytes)
        matrices[name] = GgufMatrix(tensor.tensor_type.name, _in_hf_order(name, blocks, hf))
    return matrices


def is_converted_gguf(directory: Path) -> bool:
    """Say whether a directory is one that :func:`convert_gguf` returned."""
    return (directory / _SOURCE_FILE).is_file()


def convert_weights(directory: Path, dtype: torch.dtype) -> Path:
    """Return the safetensors file of a converted directory in some dtype, dequantising the GGUF if there is none yet.

    Raises:
        FileNotFoundError: if it must be read again and is no longer there.
        ValueError: if it is damaged, or quantised in a way that cannot be undone here.
    """
    target = directory / f"model-{str(dtype).removeprefix('torch.')}.safetensors"
    if target.is_file():
        return target
    source = _source_of(directory, f"its weights in {dtype}, which have not been made before,")
    logger.info("converting %s to %s", source, target)
    reader = _open_gguf(source)
    try:
        hf = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        with temporary_beside(target) as temporary:
            _write_safetensors(temporary, reader, hf, dtype)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return target


def _source_of(directory: Path, wanted: str) -> Path:
    source = Path((directory / _SOURCE_FILE).read_text(encoding="utf-8"))
    if not source.is_file():
        raise FileNotFoundError(f"{source} is no longer there, and {wanted} must be read from it")
    return source


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes `path` when all went well: others see the whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_directory() -> Path:
    """Return a directory of this process that is removed when it ends, for machines without a writable cache."""
    directory = Path(tempfile.mkdtemp(prefix="engine_v1-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _directory_for(path: Path) -> Path:
    """Return where a GGUF's conversion goes: its name tells files apart for people, the key for the engine."""
    stat = path.stat()
    identity = f"{_FORMAT_VERSION}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    root = cache_root() or temporary_directory()
    return root / "gguf" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _open_gguf(path: Path) -> Any:
    """Open a GGUF and check that all of it is there."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads an array of strings, as vocabularies are, by one slice each, and one of numbers by a single slice."""

        def _build_fields(self, *args: Any) -> Any:
            self.data: Any = np.asarray(self.data)  # a slice of a memmap takes three times that of an array
            return super()._build_fields(*args)

        def _get_field_parts(self, start: int, kind: int) -> Any:
            if kind != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(start, kind)
            item, length = self._get(start, np.uint32), self._get(start + 4, np.uint64)
            types = [gguf.GGUFValueType.ARRAY, *([gguf.GGUFValueType(item[0])] if length[0] else [])]
            parts, at = [item, length], start + 12
            if item[0] == gguf.GGUFValueType.STRING:
                for _ in range(int(length[0])):
                    (size,) = struct.unpack_from("=Q", self.data, at)
                    parts.append(self.data[at + 8 : at + 8 + size])
                    at += 8 + size
            elif (scalar := self.gguf_scalar_to_np.get(item[0])) is not None:
                parts.append(self._get(at, scalar, length[0]))
                at += parts[-1].nbytes
            else:
                return super()._get_field_parts(start, kind)
            return at - start, parts, list(range(2, len(parts))), types

    try:
        reader = Reader(path)
        end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    except Exception as error:  # whatever a damaged file makes of the reader
        raise ValueError(f"{path} is truncated or no GGUF file ({error}); get it anew") from error
    if end > path.stat().st_size:
        raise ValueError(f"{path} is truncated: {path.stat().st_size} bytes, its tensors end at {end}; get it anew")
    return reader


def _small_files(facts: Mapping[str, Any], reader: Any, path: Path) -> dict[str, str]:
    """Return everything but the weights, by file name."""
    from engine_v1.models.gguf_tokenizer import build_tokenizer

    architecture = facts.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"a GGUF of architecture {architecture!r} is not supported; supported: 'llama'")
    if facts.get("split.count", 1) > 1:
        raise ValueError(f"one of {facts['split.count']} parts is not supported; merge them with llama-gguf-split")
    tokenizer, tokenizer_config = build_tokenizer(facts)
    hf = _hf_config(facts, {tensor.name: tensor for tensor in reader.tensors})
    eos_ids = [facts.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    eos_ids = list(dict.fromkeys(token_id for token_id in eos_ids if token_id is not None))
    generation_config = {"bos_token_id": hf["bos_token_id"], "eos_token_id": eos_ids or None}
    return {
        "config.json": json.dumps(hf, indent=1),
        "generation_config.json": json.dumps(generation_config, indent=1),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=1, ensure_ascii=False),
        _SOURCE_FILE: str(path.resolve()),
    }


def _hf_config(facts: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json."""

    def fact(name: str, default: Any = None) -> Any:
        value = facts.get(f"llama.{name}", default)
        if value is None:
            raise KeyError(f"llama.{name}")
        return value

    num_heads = fact("attention.head_count")
    if isinstance(num_heads, list) or isinstance(fact("feed_forward_length"), list):
        raise ValueError("layers of different shapes are not supported")
    head_dim = fact("attention.key_length", fact("embedding_length") // num_heads)
    if fact("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"rotating {fact('rope.dimension_count')} of {head_dim} dimensions is not supported")
    # A float32 in the file: 9.99999974e-06 is 1e-05.
    eps = float(np.format_float_positional(np.float32(fact("attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fact("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": eps,
        "rope_parameters": _rope_parameters(fact, tensors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_parameters(fact: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(fact("rope.freq_base", 10000.0))
    if _ROPE_DIVISORS in tensors:
        divisors = np.asarray(tensors[_ROPE_DIVISORS].data, np.float32).tolist()
        return {"rope_type": "divisors", "rope_theta": theta, "divisors": divisors}
    scaling = fact("rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(fact("rope.scaling.factor"))}
    raise ValueError(f"llama.rope.scaling.type is {scaling!r}; supported are 'none' and 'linear'")


def _write_safetensors(path: Path, reader: Any, hf: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write the weights one by one: no more than one of them is in memory at a time.

    The format: the header's length as a little-endian uint64, the header in JSON, the tensors back to back.
    """
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != _ROPE_DIVISORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + int(tensor.n_elements) * dtype.itemsize
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = torch.from_numpy(_dequantised(name, tensor, hf)).to(dtype)
            values.view(torch.uint8).numpy().tofile(file)


def _dequantised(name: str, tensor: Any, hf: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Return a tensor's values in float32, q and k as Hugging Face orders their rows."""
    import gguf

    try:
        # A copy, since what is not quantised is a read-only view of the file.
        values: npt.NDArray[np.float32] = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise ValueError(
            f"tensor {tensor.name!r} is of type {tensor.tensor_type.name}, which cannot be read"
        ) from error
    return _in_hf_order(name, values, hf)


def _in_hf_order(name: str, values: npt.NDArray[Any], hf: Mapping[str, Any]) -> npt.NDArray[Any]:
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{projection}." in name:
            values = unpermute(values, hf[heads])
    return values


def unpermute(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Bring rows of q or k back from the order in which a GGUF rotates them.

    There, rows 2i and 2i + 1 of a head turn together; in Hugging Face's layout, rows i and i + head_dim / 2.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [head, pair, member, ...]
    unpermuted: npt.NDArray[Any] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return unpermuted


def _hf_name(name: str) -> str:
    """Return a tensor's name in Hugging Face's layout.

    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES or kind not in ("weight", "bias"):
        raise ValueError(f"unknown tensor {name!r} for architecture 'llama'")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}"
