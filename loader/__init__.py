"""Weights from storage into host or device memory; serves any torch program and knows no model.

Importing it is cheap: public names resolve on first use, and none of them imports torch.
"""

from __future__ import annotations

from importlib import import_module

# public name → module that has it
_PUBLIC = {
    "LoadMark": "loader.progress",
    "LoadPlan": "loader.load_plan",
    "Manifest": "loader.manifest",
    "StreamOptions": "loader.options",
    "WeightStream": "loader.stream",
    "encode_manifest": "loader.manifest",
    "plan_files": "loader.plain_files",
    "plan_load": "loader.load_plan",
    "read_header": "loader.header",
    "read_manifest": "loader.manifest",
    "spawn_reader": "loader.reader_link",
    "spawn_uploader": "loader.uploader_link",
    "start": "loader.stream",
    "start_rehash": "loader.verify",
}

__all__ = sorted(_PUBLIC)  # noqa: PLE0605 - the names are strings


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'loader' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
