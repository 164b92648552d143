"""A domain's adapter of its draft model, for other programs that use peft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from drafts.errors import ExportError
from drafts.expert_key import expert_key
from drafts.version_files import read_version
from osd.serve.load import load_tokenizer
from router.app.new_folder import new_folder
from router.config import PolydraftConfig

PEFT = "peft"


def export_adapter(
    domain: str, folder: Path, config: PolydraftConfig, versions: Path, served: Mapping[str, int]
) -> int:
    """Write the served adapter of ``domain`` in peft's layout, after checking it against its draft model.

    Args:
        domain: A known domain.
        folder: What to make.
        config: The deployment, which names the draft model.
        versions: Folder of the registry.
        served: Served version by expert, see :mod:`drafts.expert_key`.

    Returns:
        The adapter's version.

    Raises:
        ExportError: The domain has no draft model or no adapter.
        InvalidValueError: The draft model cannot be loaded.
        CheckpointError: The adapter cannot be read, or belongs to another model or rank.
    """
    from drafts.adapters import write_peft
    from drafts.kinds.model import load_draft

    item = next((item for item in config.domains if item.name == domain), None)
    own = None if item is None else item.draft
    sources = config.drafts.sources if item is None or item.sources is None else item.sources
    model = own or (config.drafts.model if "model" in sources else None)
    if model is None:
        raise ExportError(
            domain,
            PEFT,
            "peft holds adapters of draft models; this domain has an eagle expert (vllm or speculators)",
        )
    key = expert_key(domain, "model")
    if not model.rank:
        raise ExportError(
            domain, PEFT, f"its draft model {model.path} is served as it is (rank: 0) and has no adapter"
        )
    if key not in served:
        raise ExportError(domain, PEFT, f"its adapter of {model.path} has no version in the state folder")
    tensors = read_version(versions, key, served[key]).tensors
    draft = load_draft(model, load_tokenizer(config.target.model, config.target.cache_dir))
    assert draft.adapters is not None
    draft.adapters.check(tensors)
    with new_folder(folder) as part:
        write_peft(part, tensors, model.path)
    return served[key]
