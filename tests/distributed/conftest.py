"""The tiny models that the workers load."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders of tiny random models, by name."""
    from tiny_models import CONFIGS, write_model

    root = tmp_path_factory.mktemp("models")
    for name in CONFIGS:
        write_model(name, root / name)
    return {name: root / name for name in CONFIGS}
