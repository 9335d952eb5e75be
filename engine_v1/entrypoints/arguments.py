"""Option types that the commands share."""

import argparse
import json
from typing import Any

DEFAULT_SPECULATIVE_CONFIG = '{"method": "suffix"}'  # the fastest of the methods that need no preparation


def json_object(text: str) -> dict[str, Any] | None:
    """Read an option's JSON object; null is None.

    Raises:
        ArgumentTypeError: it is neither.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if value is not None and not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as {DEFAULT_SPECULATIVE_CONFIG}, got {text}")
    return value
