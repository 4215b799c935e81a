"""Find the four networks of a published MiniMax-H3 tree and decide its layout by tensor names, never by folder names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.errors import ArtifactError
from prepare.checkpoint import ComponentFiles, list_names, open_component, read_json
from prepare.families.minimax_h3.published import AUDIO_VAE, TEXT_ENCODER, TRANSFORMER, VIDEO_VAE

NATIVE, DIFFUSERS = "native", "diffusers"
PRUNED_MARK = "adaln_t_table"


@dataclass(frozen=True)
class Partition:
    """One of the two transformers that share every other network.

    native: its folder in a native repository. diffusers: folder of the transformer in a Diffusers tree.
    """

    name: str
    native: str
    diffusers: str
    tasks: tuple[str, ...]


PARTITIONS = {
    "fl2va": Partition("fl2va", "FL2VA", "transformer", ("t2va", "fl2va")),
    "ref2va": Partition("ref2va", "Ref2VA", "transformer_ref", ("ref2va",)),
}

_FOLDERS = {
    DIFFUSERS: {TEXT_ENCODER: "text_encoder", VIDEO_VAE: "vae", AUDIO_VAE: "audio_vae"},
    NATIVE: {TEXT_ENCODER: "text_encoder", VIDEO_VAE: "video_vae/source", AUDIO_VAE: "audio_vae"},
}
_CLASS_LAYOUT = {"MiniMaxH3Transformer3DModel": DIFFUSERS, "MiniMaxH3DiTModel": NATIVE}
_MARKS = {
    NATIVE: ("blocks.", "video_patch_proj.", "audio_patch_proj.", "final_layer.", "condition_proj."),
    DIFFUSERS: ("transformer_blocks.", "proj_in.", "audio_proj_in.", "context_embedder.", "norm_out."),
}


@dataclass(frozen=True)
class SourceTree:
    """One published checkpoint. `root` is the folder that holds the networks' folders."""

    root: Path
    layout: str
    components: Mapping[str, ComponentFiles]
    partition: Partition

    @property
    def transformer_config(self) -> str:
        """Path of the transformer's configuration, relative to `root`."""
        return f"{self.components[TRANSFORMER].folder.name}/config.json"

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for component in self.components.values() for note in component.notes)


def open_tree(checkpoint: Path, partition: str = "fl2va") -> SourceTree:
    """Open a MiniMax-H3 checkpoint: a Diffusers tree, a native partition, or a repository that holds native partitions.

    Args:
        partition: key of `PARTITIONS`.
    Raises: ArtifactError: not a tree of this model, a mixture of layouts, another partition, damaged files.
    """
    chosen = PARTITIONS[partition]
    folder = _find_transformer(checkpoint, chosen)
    transformer = open_component(folder)
    layout = detect_layout(transformer.tensors, folder.name)
    check_class(folder, layout, transformer.tensors)
    if layout == NATIVE:
        _check_partition(folder.parent, chosen)
    elif folder.name != chosen.diffusers:
        raise ArtifactError(
            "partition is missing", where=str(folder.parent), found=folder.name, expected=chosen.diffusers
        )
    others = {name: open_component(folder.parent / other) for name, other in _FOLDERS[layout].items()}
    return SourceTree(folder.parent, layout, {TRANSFORMER: transformer, **others}, chosen)


def detect_layout(names: Collection[str], where: str) -> str:
    """`"native"` or `"diffusers"` from the names of the transformer's tensors.

    Raises: ArtifactError: a pruned checkpoint, names of both layouts, or of neither.
    """
    if PRUNED_MARK in names:
        raise ArtifactError(
            f"pruned AdaLN checkpoint: {PRUNED_MARK} replaces the full adaln_proj projections",
            where=where,
            hint="use the published full checkpoint",
        )
    marked = {layout: [name for name in names if name.startswith(marks)] for layout, marks in _MARKS.items()}
    found = [layout for layout, matching in marked.items() if matching]
    if len(found) != 1:
        samples = {layout: list_names(matching, 3) for layout, matching in marked.items() if matching}
        raise ArtifactError(
            "tensor names mix two layouts" if found else "layout not recognised by tensor names",
            where=where,
            found=samples or list_names(sorted(names), 3),
            expected="native (blocks.0.attn.qkv_proj.weight) or diffusers (transformer_blocks.0.attn.to_q.weight)",
        )
    return found[0]


def check_class(folder: Path, layout: str, names: Collection[str]) -> None:
    """The configuration beside the weights must be of their layout: its keys differ between the two.

    Raises: ArtifactError: its class belongs to the other layout.
    """
    declared = read_json(folder / "config.json", f"{folder.name}/config.json").get("_class_name")
    if _CLASS_LAYOUT.get(str(declared), layout) != layout:
        marked = [name for name in names if name.startswith(_MARKS[layout])]
        raise ArtifactError(
            f"layout of the tensors is {layout} ({list_names(marked, 3)}), the configuration's class is not",
            where=f"{folder.name}/config.json: _class_name",
            found=repr(declared),
            hint="take weights and configuration from one folder",
        )


def _find_transformer(checkpoint: Path, partition: Partition) -> Path:
    if not checkpoint.is_dir():
        raise ArtifactError("checkpoint folder does not exist", where=str(checkpoint))
    places = dict.fromkeys((partition.diffusers, f"{partition.native}/transformer", "transformer"))
    for place in places:
        if (checkpoint / place).is_dir():
            return checkpoint / place
    raise ArtifactError(
        "not a MiniMax-H3 checkpoint",
        where=str(checkpoint),
        found=list_names(sorted(path.name for path in checkpoint.iterdir())),
        expected=f"a folder with one of {', '.join(f'{place}/' for place in places)}",
    )


def _check_partition(root: Path, partition: Partition) -> None:
    where = "model_index.json: _minimax_h3"
    block = read_json(root / "model_index.json", "model_index.json").get("_minimax_h3")
    if not isinstance(block, dict):
        raise ArtifactError("block is missing", where=where)
    if block.get("schema_version") != 1:
        raise ArtifactError(
            "unknown schema_version", where=where, found=repr(block.get("schema_version")), expected=1
        )
    if block.get("partition") != partition.name:
        raise ArtifactError(
            f"partition cannot serve {' and '.join(partition.tasks)}",
            where=where,
            found=repr(block.get("partition")),
            expected=repr(partition.name),
            hint=f"prepare the {partition.native} folder, or choose another --partition",
        )
