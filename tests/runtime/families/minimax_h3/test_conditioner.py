"""The conditioner against transformers (Qwen3-VL): the residual stream after the conditioning layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loader.errors import ArtifactError, InternalError
from runtime.families.minimax_h3.config import H3Config
from runtime.families.minimax_h3.model.conditioner import EMBEDDING, encode_prompt, mrope_positions
from runtime.families.minimax_h3.tokens import ImageSpan, TokenStream
from runtime.ops.attention import attention
from tests.fakes.h3_weights import build_encoder, conditioner_groups, on_meta, random_config
from tests.fakes.weights import DictWeights

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PATCH_WIDTH = 3 * 2 * 16 * 16
# Text rows before, between and after the pictures, and the pictures' grids.
LAYOUTS = {
    "one_square": ((4, 3), ((4, 4),)),
    "one_wide": ((2, 9), ((2, 12),)),
    "one_tall": ((7, 1), ((10, 4),)),
    "two": ((3, 5, 8), ((6, 4), (2, 8))),
    "two_equal_adjacent_labels": ((3, 1, 20), ((4, 6), (4, 6))),
}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def stream(config: H3Config, texts, grids, seed=0) -> TokenStream:
    """Random text ids around picture blocks; the delimiters are text rows with tag 0."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    tags: list[int] = []
    spans = []
    for number, count in enumerate(texts):
        ids += torch.randint(0, 90, (count,), generator=generator).tolist()
        tags += [1] * count
        if number < len(grids):
            height, width = grids[number]
            spans.append(ImageSpan(len(ids) + 1, height, width))
            pads = height * width // 4
            ids += [config.tokens.vision_start_token_id, *[config.tokens.image_token_id] * pads]
            ids += [config.tokens.vision_end_token_id]
            tags += [0] * (pads + 2)
    return TokenStream(tuple(ids), tuple(tags), tuple(spans))


def prepared(state) -> DictWeights:
    return DictWeights(
        conditioner_groups(state), {EMBEDDING: state["model.language_model.embed_tokens.weight"]}
    )


def random_patches(tokens: TokenStream):
    torch.manual_seed(5)
    return [torch.randn(image.grid_h * image.grid_w, PATCH_WIDTH) for image in tokens.images]


def oracle(config, model, tokens, patches):
    """`hidden_states[conditioning_layer]` of the whole model."""
    ids = torch.tensor([tokens.ids])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == config.tokens.image_token_id).int()}
    if patches:
        inputs["pixel_values"] = torch.cat(patches)
        inputs["image_grid_thw"] = torch.tensor([(1, s.grid_h, s.grid_w) for s in tokens.images])
    out = model.model(**inputs, output_hidden_states=True, use_cache=False)
    return out.hidden_states[config.text.conditioning_layer][0]


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 31])
@pytest.mark.parametrize("seed", range(6))
def test_text_rows_equal_transformers(seed, rows, dtype):
    config = random_config(seed)
    model, state = build_encoder(config, seed, dtype)
    tokens = stream(config, (rows,), ())

    found = encode_prompt(config, prepared(state), tokens, [], "cpu")

    assert found.dtype == dtype
    assert torch.equal(found, oracle(config, model, tokens, []))


@pytest.mark.oracle
@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_with_pictures_equal_transformers(seed, layout, dtype):
    config = random_config(seed)
    model, state = build_encoder(config, seed, dtype)
    tokens = stream(config, *LAYOUTS[layout])
    patches = random_patches(tokens)

    found = encode_prompt(config, prepared(state), tokens, patches, "cpu")

    assert torch.equal(found, oracle(config, model, tokens, patches))


@pytest.mark.oracle
def test_fifty_layers_of_the_released_depth_equal_transformers():
    small = random_config(2)
    text = dataclasses.replace(small.text, num_hidden_layers=52, conditioning_layer=50)
    config = dataclasses.replace(small, text=text)
    model, state = build_encoder(config, 2, torch.bfloat16)
    tokens = stream(config, *LAYOUTS["two"])
    patches = random_patches(tokens)

    found = encode_prompt(config, prepared(state), tokens, patches, "cpu")

    assert torch.equal(found, oracle(config, model, tokens, patches))


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(3))
def test_rows_stay_close_to_separate_projections(seed):
    config = random_config(seed)
    model, state = build_encoder(config, seed, torch.float32, fused=False)
    tokens = stream(config, *LAYOUTS["two"])
    patches = random_patches(tokens)

    found = encode_prompt(config, prepared(state), tokens, patches, "cpu")

    # Other shapes of a product may sum in another order: fp32 noise through five layers and the tower.
    torch.testing.assert_close(found, oracle(config, model, tokens, patches), rtol=1e-5, atol=2e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_equal_transformers(layout):
    config = random_config(0)
    model, _ = build_encoder(config, 0, torch.float32)
    tokens = stream(config, *LAYOUTS[layout])
    ids = torch.tensor([tokens.ids])
    grids = torch.tensor([(1, image.grid_h, image.grid_w) for image in tokens.images])

    found = mrope_positions(tokens, config.vision.spatial_merge_size)

    types = (ids == config.tokens.image_token_id).int()
    expected, _ = model.model.get_rope_index(ids, types, image_grid_thw=grids)
    assert torch.equal(found, expected[:, 0])


def test_text_positions_count_rows_on_all_axes():
    tokens = TokenStream(ids=(5,) * 4, tags=(1,) * 4, images=())

    assert mrope_positions(tokens, 2).tolist() == [[0, 1, 2, 3]] * 3


def test_a_picture_moves_the_following_text_by_its_longer_side():
    # Rows: 2 text, vision_start, 2 x 3 merged patches, vision_end, 1 text.
    tokens = TokenStream(ids=(0,) * 11, tags=(1,) * 11, images=(ImageSpan(3, 4, 6),))

    assert mrope_positions(tokens, 2).tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]


def test_layers_are_asked_for_one_by_one_and_no_further_than_the_conditioning_layer():
    config = random_config(0)
    weights = prepared(build_encoder(config, 0, torch.float32)[1])
    text, pictures = stream(config, (5,), ()), stream(config, (2, 3), ((4, 4),))
    layers = [f"text_encoder/layers.{i}" for i in range(config.text.conditioning_layer)]

    encode_prompt(config, weights, text, [], "cpu")
    asked_for_text = list(weights.asked)
    weights.asked.clear()
    encode_prompt(config, weights, pictures, random_patches(pictures), "cpu")

    assert asked_for_text == layers
    assert weights.asked == ["text_encoder/visual", *layers]


def test_each_layer_runs_before_the_next_group_is_asked_for():
    config = random_config(1)
    weights = prepared(build_encoder(config, 1, torch.float32)[1])
    asked_at_attention = []

    def watched(q, k, v, *, causal=False, scale=None):
        asked_at_attention.append((len(weights.asked), causal))
        return attention(q, k, v, causal=causal, scale=scale)

    encode_prompt(config, weights, stream(config, (5,), ()), [], "cpu", watched)

    assert asked_at_attention == [(i + 1, True) for i in range(config.text.conditioning_layer)]


def test_everything_runs_on_the_given_device():
    config = random_config(0)
    weights = on_meta(prepared(build_encoder(config, 0, torch.bfloat16)[1]))
    tokens = stream(config, *LAYOUTS["two"])

    rows = encode_prompt(config, weights, tokens, random_patches(tokens), "meta")

    # The meta device refuses most operands of another device, as CUDA does.
    assert rows.device == torch.device("meta")
    assert rows.shape == (len(tokens.ids), config.text.hidden_size)


def test_each_distinct_embedding_row_is_read_once():
    config = random_config(1)
    weights = prepared(build_encoder(config, 1, torch.float32)[1])
    read = []
    gather = weights.rows
    weights.rows = lambda name, rows: read.append((name, list(rows))) or gather(name, rows)
    tokens = TokenStream(ids=(7, 3, 7, 7, 50), tags=(1,) * 5, images=())

    encode_prompt(config, weights, tokens, [], "cpu")

    assert read == [(EMBEDDING, [3, 7, 50])]


@pytest.mark.parametrize("count", [0, 2], ids=["missing", "one_too_many"])
def test_pictures_that_disagree_with_the_stream_are_refused(count):
    config = random_config(0)
    weights = prepared(build_encoder(config, 0, torch.float32)[1])
    tokens = stream(config, (2, 3), ((4, 4),))
    patches = random_patches(tokens) * count
    with pytest.raises(InternalError, match="pictures disagree"):
        encode_prompt(config, weights, tokens, patches, "cpu")


def test_a_layer_without_its_tensors_names_them():
    config = random_config(0)
    weights = prepared(build_encoder(config, 0, torch.float32)[1])
    del weights.groups["text_encoder/layers.2"]["model.language_model.layers.2.mlp.gate_up_proj.weight"]
    with pytest.raises(ArtifactError, match=r"layers\.2\.mlp\.gate_up_proj\.weight"):
        encode_prompt(config, weights, stream(config, (3,), ()), [], "cpu")
