"""Rotary position embeddings: frequencies as a checkpoint's configuration asks for them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "divisors")
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles."""

    theta: float = _DEFAULT_THETA  # base of the wavelengths
    rope_type: str = "default"  # one of SUPPORTED_ROPE_TYPES
    factor: float = 1.0  # how far the context is stretched beyond that of pretraining
    original_max_position_embeddings: int = 0  # context of pretraining; llama3 and yarn only
    low_freq_factor: float = 1.0  # llama3: wavelengths beyond original / low are stretched by the whole factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original / high are left alone
    beta_fast: float = 32.0  # yarn: dimensions that turn more often than this over the context are left alone
    beta_slow: float = 1.0  # yarn: dimensions that turn less often are stretched by the whole factor
    truncate: bool = True  # yarn: round the bounds between the two to whole dimensions
    attention_factor: float = 1.0  # yarn: scale of cos and sin
    divisors: tuple[float, ...] = ()  # of each pair's frequency: what a GGUF holds of llama3's scaling

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`, from a config.json.

        Raises:
            ValueError: on a scaling type that is not supported, or a setting it needs and lacks.
        """
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ValueError(f"config.json: rope_parameters per layer type are not supported, got {given!r}")
        theta = float(given.get("rope_theta") or hf.get("rope_theta") or _DEFAULT_THETA)
        partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor={partial!r} is not supported; only 1.0 is")
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"config.json: rope scaling of type {rope_type!r} is not supported; "
                f"supported types: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        if rope_type == "default":
            return cls(theta)
        if rope_type == "divisors":
            return cls(theta, rope_type, divisors=tuple(given["divisors"]))
        original = given.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
        factor = given.get("factor")
        if factor is None and rope_type == "yarn" and original:
            factor = hf.get("max_position_embeddings", original) / original
        if factor is None or not original:
            raise ValueError(f"config.json: rope scaling {rope_type!r} needs a 'factor', got {given!r}")
        if rope_type == "linear":
            return cls(theta, rope_type, float(factor))
        if rope_type == "llama3":
            return cls(
                theta,
                rope_type,
                float(factor),
                int(original),
                low_freq_factor=float(given.get("low_freq_factor", 1.0)),
                high_freq_factor=float(given.get("high_freq_factor", 4.0)),
            )
        return cls(
            theta,
            rope_type,
            float(factor),
            int(original),
            beta_fast=float(given.get("beta_fast") or 32),
            beta_slow=float(given.get("beta_slow") or 1),
            truncate=bool(given.get("truncate", True)),
            attention_factor=_yarn_attention_factor(given, float(factor)),
        )

    def max_position_embeddings(self, configured: int) -> int:
        """Return how many positions the model handles, given config.json's `max_position_embeddings`.

        For llama3 that figure already counts the stretching; for linear and yarn it is the context of pretraining,
        unless it has been raised to the stretched one.
        """
        if self.rope_type == "linear":
            return int(configured * self.factor)
        if self.rope_type == "yarn":
            return max(configured, int(self.original_max_position_embeddings * self.factor))
        return configured

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair of dimensions: float32[head_dim / 2].

        Source: llama3 as in Meta's reference code for Llama 3.1; yarn as in "YaRN: Efficient Context Window
        Extension of Large Language Models", arXiv 2309.00071.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq = 1.0 / self.theta**exponents
        if self.rope_type == "linear":
            return inv_freq / self.factor
        if self.rope_type == "divisors":
            return inv_freq / torch.tensor(self.divisors, dtype=torch.float32)
        if self.rope_type == "llama3":
            turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
            smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return _mix(inv_freq / self.factor, inv_freq, smooth.clamp(0, 1))
        if self.rope_type == "yarn":
            low, high = (self._yarn_dimension(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            stretch = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
            return _mix(inv_freq, inv_freq / self.factor, stretch.clamp(0, 1))
        return inv_freq

    def _yarn_dimension(self, turns: float, head_dim: int) -> float:
        """Return the (fractional) pair of dimensions that turns this often over the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.theta))


def _mix(a: torch.Tensor, b: torch.Tensor, share_of_b: torch.Tensor) -> torch.Tensor:
    return a * (1 - share_of_b) + b * share_of_b


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)
