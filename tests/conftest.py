"""Fixtures that several parts share."""

import pytest
import torch

# The tensors of most tests are tiny: a second thread of torch's costs more than it gives. Kernels keep all threads.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model_path():
    """The demo model's directory; tests that need it are skipped where it can be neither found nor fetched."""
    from engine_v1.models.hub import DEMO_MODEL, resolve_model

    try:
        return resolve_model(DEMO_MODEL)
    except FileNotFoundError as error:
        pytest.skip(f"the demo model is not at hand: {error}")
