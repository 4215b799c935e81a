"""Token streams: markers, image blocks, forged vision tokens, the admission limit, the resize rule."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2TokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from loader.errors import ArtifactError, RequestError
from runtime.families.minimax_h3 import tokens
from runtime.families.minimax_h3.config import ImageProcessorConfig, SpecialTokens
from tests.runtime.families.minimax_h3.small_config import small_config

INPUTS = Path(__file__).parents[3] / "cases" / "inputs"
CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
FIRST_SPECIAL = 151_643
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer(*, markers: bool = True, first_special: int = FIRST_SPECIAL, vision: bool = True) -> Tokenizer:
    """Byte-level tokenizer with the released ids of the special tokens (filler words in between)."""
    from tokenizers import Regex

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: i for i, letter in enumerate(sorted(letters))}
    vocabulary |= {"Ġ" + letter: len(vocabulary) + i for i, letter in enumerate("abc")}
    vocabulary |= {f"unused{i}": i for i in range(len(vocabulary), first_special)}
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", letter) for letter in "abc"]))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    names = list(CHAT)
    names += [
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
    ]
    names += list(VISION) if vision else []
    names += [f"<filler{i}>" for i in range(26 - len(names))]
    names += list(tokens.H3_MARKERS) if markers else []
    result.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return result


def plain(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def prompt_of(case: str) -> str:
    entries = json.loads((INPUTS / "index.json").read_text())
    file = next(entry["file"] for entry in entries if entry["id"] == case)
    return json.loads((INPUTS / file).read_text())["prompt"]


def test_text_only_stream_is_the_prompt_verbatim() -> None:
    stream = tokens.build_token_stream(small_config(), tokenizer(), "  A cat,\n and Dogs ")
    assert list(stream.ids) == plain("  A cat,\n and Dogs ")
    assert tokenizer().decode(list(stream.ids)) == "  A cat,\n and Dogs "
    assert set(stream.tags) == {1}
    assert stream.images == ()


def test_keyframes_come_first_with_label_and_block() -> None:
    stream = tokens.build_token_stream(small_config(), tokenizer(), "a cat", [(1344, 768), (1344, 768)])
    label = [plain(f"<Picture {i}>: ") for i in (1, 2)]
    block = [151_652] + [151_655] * 1008 + [151_653]
    assert list(stream.ids) == label[0] + block + label[1] + block + plain("a cat")
    tags = [*[1] * len(label[0]), *[0] * 1010]
    assert list(stream.tags) == tags + tags + [1] * len(plain("a cat"))
    assert [(s.grid_h, s.grid_w) for s in stream.images] == [(48, 84)] * 2
    for span in stream.images:
        assert stream.ids[span.start - 1] == 151_652
        assert set(stream.ids[span.start : span.start + 1008]) == {151_655}
        assert stream.ids[span.start + 1008] == 151_653


def test_pieces_are_tokenized_apart() -> None:
    stream = tokens.build_token_stream(small_config(), tokenizer(), "a", [(32 * 16, 32 * 16)])
    joined = plain("<Picture 1>:  a")
    assert list(stream.ids)[-1:] == plain("a")
    assert len(plain(" a")) == 1  # the merge that joining would make
    assert joined[-1] != stream.ids[-1]


@pytest.fixture(scope="module")
def reference_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Qwen2TokenizerFast:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return Qwen2TokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "case", ["R014", "R015", "R017", "R018", "R019", "R020", "R021", "R022", "R023", "R026"]
)
def test_prompts_encode_as_the_reference_tokenizer(
    case: str, reference_tokenizer: Qwen2TokenizerFast
) -> None:
    prompt = prompt_of(case)
    stream = tokens.build_token_stream(small_config(), tokenizer(), prompt)
    assert list(stream.ids) == reference_tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("case", ["R014", "R015"])
def test_h3_markers_are_single_ids(case: str) -> None:
    stream = tokens.build_token_stream(small_config(), tokenizer(), prompt_of(case))
    special = [token for token in stream.ids if token >= FIRST_SPECIAL]
    expected = {"R014": [151_669, 151_670, 151_671], "R015": list(range(151_669, 151_676))}
    assert special == expected[case]


@pytest.mark.parametrize("case", ["R016", "R017"])
def test_control_tokens_in_a_prompt(case: str) -> None:
    stream = tokens.build_token_stream(small_config(), tokenizer(), prompt_of(case))
    assert not set(stream.ids) & {151_652, 151_653, 151_655, 151_656}
    assert tokenizer().decode(list(stream.ids), skip_special_tokens=False) == prompt_of(case)
    assert set(stream.tags) == {1}
    assert stream.images == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["<|", "|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "<",
                                 "a", " b", "\n", "<d>", "é", "<|im_end|>", "<|image_pad"]), min_size=1, max_size=12))  # fmt: skip
def test_no_prompt_forges_an_image_block(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokens.encode_prompt_text(small_config(), tokenizer(), text)
    assert not set(ids) & {151_652, 151_653, 151_655, 151_656}
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


def test_vision_tokens_have_the_ids_of_plain_text() -> None:
    text = "see <|vision_start|><|image_pad|><|vision_end|> a cat <|video_pad|>."
    without = tokenizer(vision=False)
    assert tokens.encode_prompt_text(small_config(), tokenizer(), text) == without.encode(text).ids


def test_limit_counts_every_row_and_cuts_nothing() -> None:
    config, tok = small_config(), tokenizer()
    prompt = "7" * 16_384
    assert len(tokens.build_token_stream(config, tok, prompt).ids) == 16_384
    with pytest.raises(RequestError, match=r"prompt: .*too long; found 16385 .*at most 16384") as caught:
        tokens.build_token_stream(config, tok, prompt + "7")
    assert caught.value.http_status == 400
    with pytest.raises(RequestError, match=r"found 1739\d"):
        tokens.build_token_stream(config, tok, prompt[:-10], [(1344, 768)])


def test_long_prompt_of_ten_thousand_words_passes_and_a_hundred_thousand_does_not() -> None:
    # byte-level ids: a word of the case text counts as its letters here, so words are shortened to one letter
    words = " a".join([""] * 10_001)
    assert len(tokens.build_token_stream(small_config(), tokenizer(), words).ids) == 10_000
    with pytest.raises(RequestError, match="token rows"):
        tokens.build_token_stream(small_config(), tokenizer(), words * 10)


def test_stock_tokenizers_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"<d>, </d>, <\|cutoff\|>"):
        tokens.build_token_stream(small_config(), tokenizer(markers=False), "x")
    with pytest.raises(ArtifactError, match="outside the embedding"):
        tokens.build_token_stream(small_config(vocab_size=151_670), tokenizer(), "x")
    wrong = SpecialTokens(160_000, 151_656, 151_652, 151_653)
    with pytest.raises(ArtifactError, match="without a token"):
        tokens.build_token_stream(small_config(tokens=wrong), tokenizer(), "x")


def test_empty_stream_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        tokens.build_token_stream(small_config(), tokenizer(), "", [(512, 512)])


@pytest.mark.oracle
@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    limits=st.sampled_from([(65_536, 16_777_216), (1024, 4_194_304), (3136, 1_003_520)]),
)
def test_resize_rule_equals_the_reference(width: int, height: int, limits: tuple[int, int]) -> None:
    config = small_config(image_processor=ImageProcessorConfig(*limits))
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(RequestError, match="elongated"):
            tokens.resized_size(width, height, config)
        return
    expected = smart_resize(height, width, factor=32, min_pixels=limits[0], max_pixels=limits[1])
    assert tokens.resized_size(width, height, config) == expected


def test_published_canvas_is_not_resampled() -> None:
    assert tokens.resized_size(1344, 768, small_config()) == (768, 1344)
    assert tokens.resized_size(64, 64, small_config()) == (
        256,
        256,
    )  # below the processor's floor: for the encoder only
