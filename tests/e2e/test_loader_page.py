"""The examples of docs/loader.md run as they stand, on files that this project did not write."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file

from scripts.tiny_checkpoint import write_tiny_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "loader.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer as diffusers saves it."""
    root = tmp_path_factory.mktemp("page")
    write_tiny_checkpoint(root / "source", "test", "diffusers", seed=2)
    model = diffusers_model(root / "source" / "transformer")
    model.save_pretrained(root / "transformer", max_shard_size="200KB")
    return root / "transformer"


@pytest.fixture(scope="module")
def expected(component: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(component.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def diffusers_model(folder: Path) -> Any:
    load: Any = MiniMaxH3Transformer3DModel.from_pretrained
    return load(folder, dtype=torch.bfloat16)


def run(example: int, directory: Path, **names: Any) -> dict[str, Any]:
    """In the folder that holds the directory: the first example names it, by its text."""
    scope = {"directory": directory, "device": "cpu", **names}
    with contextlib.chdir(directory.parent):
        exec(compile(EXAMPLES[example], f"{PAGE.name}, example {example}", "exec"), scope)
    return scope


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_page_has_three_examples() -> None:
    assert len(EXAMPLES) == 3


def test_files_become_a_state_dict(component: Path, expected: dict[str, torch.Tensor]) -> None:
    assert len(list(component.glob("*.safetensors"))) > 1
    assert_same(run(0, component)["state"], expected)


def test_files_go_into_a_module_that_works_like_the_library_s_own(
    component: Path, expected: dict[str, torch.Tensor]
) -> None:
    model = run(1, component)["model"]
    own = diffusers_model(component)
    assert_same(dict(model.named_parameters()), expected)
    assert_same(dict(model.named_buffers()), dict(own.named_buffers()))


def test_groups_come_one_after_the_other(component: Path, expected: dict[str, torch.Tensor]) -> None:
    blocks: list[dict[str, torch.Tensor]] = []
    run(2, component, use=lambda block: blocks.append(dict(block)))
    wanted = {name: tensor for name, tensor in expected.items() if name.startswith("transformer_blocks.")}
    assert [{name.split(".")[1] for name in block} for block in blocks] == [{"0"}, {"1"}, {"2"}]
    assert_same({name: tensor for block in blocks for name, tensor in block.items()}, wanted)
