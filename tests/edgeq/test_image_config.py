"""Settings of pictures: read from preprocessor_config.json by key, and refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from edgeq.errors import EdgeqError, FormatError, UnsupportedError
from edgeq.network.image_config import ImageConfig
from edgeq.pictures.preprocessor import CLIP_MEAN, CLIP_STD

SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
QWEN: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, **SIZES}
CLIP: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336}, "crop_size": 336}
SIGLIP: dict[str, Any] = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}
TILES: dict[str, Any] = {"image_processor_type": "Idefics3ImageProcessor"}
GOT: dict[str, Any] = {"image_processor_type": "GotOcr2ImageProcessor"}
LFM: dict[str, Any] = {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 14, "tile_size": 504}
GEMMA_4: dict[str, Any] = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "pooling_kernel_size": 1}
READ = {
    "published Qwen2-VL": (QWEN, {"sizing": "factor", "min_pixels": 3136, "max_pixels": 12845056}),
    "Qwen2-VL by transformers 5": (
        {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 784, "longest_edge": 50176}},
        {"sizing": "factor", "min_pixels": 784, "max_pixels": 50176},
    ),
    "CLIP": (CLIP, {"sizing": "crop", "shortest_edge": 336, "height": 336, "width": 336}),
    "old CLIP": (
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "resample": 3},
        {"sizing": "crop", "shortest_edge": 224, "height": 224, "width": 224},
    ),
    "LLaVA": (
        {"image_processor_type": "LlavaImageProcessorFast", "size": {"shortest_edge": 336}, "crop_size": 336},
        {"sizing": "crop", "shortest_edge": 336, "height": 336, "width": 336},
    ),
    "SigLIP": (SIGLIP, {"sizing": "fixed", "height": 384, "width": 384, "mean": (0.5,) * 3, "std": (0.5,) * 3}),
    "SmolVLM": (
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048}}
        | {
            "max_image_size": {"longest_edge": 512},
            "do_image_splitting": True,
            "do_pad": True,
            "image_mean": [0.5] * 3,
            "video_sampling": {"fps": 1},
        },
        {"sizing": "tiles", "longest_edge": 2048, "tile": 512, "resampling": "lanczos", "mean": (0.5,) * 3},
    ),
    "Idefics3 by its defaults": (
        {"image_processor_type": "Idefics3ImageProcessorFast"},
        {"sizing": "tiles", "longest_edge": 1456, "tile": 364, "mean": (0.5,) * 3, "std": (0.5,) * 3},
    ),
    "InternVL3": (
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}, "max_patches": 12}
        | {"crop_to_patches": False, "crop_size": None, "do_center_crop": None, "min_patches": 1},
        {"sizing": "aspect", "tile": 448, "min_tiles": 1, "max_tiles": 12, "height": 0},
    ),
    "LFM2-VL": (
        LFM | {"size": {"height": 512, "width": 512}, "crop_size": None, "max_num_patches": 1024, "downsample_factor": 1},
        {"sizing": "large", "tile": 504, "min_tiles": 2, "max_tiles": 10, "min_pixels": 12544, "max_pixels": 50176}
        | {"tolerance": 2.0, "least_edge": 14, "resampling": "bilinear", "mean": (0.5,) * 3},
    ),
    "LFM2-VL that cuts nothing": (
        LFM | {"do_image_splitting": False, "downsample_factor": 1},
        {"sizing": "large", "min_tiles": 1, "max_tiles": 1, "mean": (0.5,) * 3},
    ),
    "GOT-OCR2 by its defaults": (
        {"image_processor_type": "GotOcr2ImageProcessor"},
        {"sizing": "aspect", "tile": 384, "min_tiles": 1, "max_tiles": 12},
    ),
    "Gemma 3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, "resample": 2}
        | {"do_pan_and_scan": None, "image_seq_length": 256, "pan_and_scan_min_crop_size": None},
        {"sizing": "fixed", "height": 896, "width": 896, "resampling": "bilinear", "mean": (0.5,) * 3},
    ),
    "Gemma 4": (
        GEMMA_4
        | {"max_soft_tokens": 560, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "size": None}
        | {"image_seq_length": 280},
        {"sizing": "budget", "max_pixels": 560 * 196, "mean": (0.5,) * 3, "std": (0.5,) * 3, "resampling": "bicubic"},
    ),
    "Gemma 4 that normalizes": (
        GEMMA_4 | {"do_normalize": True, "image_mean": [0.25] * 3, "image_std": [0.5] * 3},
        {"max_pixels": 280 * 196, "mean": (0.5,) * 3, "std": (0.25,) * 3},
    ),
    "bilinear": (SIGLIP | {"resample": 2}, {"resampling": "bilinear"}),
    "not normalized": (CLIP | {"do_normalize": False}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
    "not rescaled": (CLIP | {"do_rescale": False}, {"rescale": 1.0}),
    "null": (CLIP | {"do_convert_rgb": None, "do_pad": None, "processor_class": "LlavaProcessor"}, {"sizing": "crop"}),
}
REFUSED = {
    "another processor": ({"image_processor_type": "MllamaImageProcessor"}, UnsupportedError, "MllamaImageProcessor"),
    "none": ({}, UnsupportedError, "image_processor_type None"),
    "a list": ([], FormatError, "not a JSON object"),
    "unknown key": (CLIP | {"do_flip": True}, UnsupportedError, "keys do_flip"),
    "no resizing": (CLIP | {"do_resize": False}, UnsupportedError, "do_resize False"),
    "padding": (CLIP | {"do_pad": True}, UnsupportedError, "do_pad True"),
    "no crop": (CLIP | {"do_center_crop": False}, UnsupportedError, "size"),
    "a border": (CLIP | {"crop_size": 400}, UnsupportedError, "with a border"),
    "other patches": (QWEN | {"patch_size": 16}, UnsupportedError, "patch_size 16 is not supported; only 14"),
    "filter": (CLIP | {"resample": 9}, UnsupportedError, "resample 9"),
    "size": (SIGLIP | {"size": {"max_height": 3}}, UnsupportedError, "size"),
    "one tile alone": (TILES | {"do_image_splitting": False}, UnsupportedError, "do_image_splitting False"),
    "tiles of other sizes": (TILES | {"do_pad": False}, UnsupportedError, "do_pad False"),
    "tiles by two edges": (TILES | {"max_image_size": {"height": 3}}, UnsupportedError, "max_image_size .* longest_edge"),
    "tiles that are no squares": (GOT | {"size": {"height": 9, "width": 8}}, UnsupportedError, "9 x 8 .* expected a square"),
    "no whole one": (LFM | {"use_thumbnail": False}, UnsupportedError, "use_thumbnail False"),
    "one tile of a large one": (LFM | {"min_tiles": 1}, UnsupportedError, "min_tiles 1 with max_tiles 10"),
    "tiles of a part of a token": (LFM | {"tile_size": 100}, UnsupportedError, "tile_size 100 .* a multiple of 28"),
    "tokens as text": (LFM | {"max_image_tokens": "9"}, FormatError, "max_image_tokens is '9'"),
    "other patches than the tower's": (LFM | {"encoder_patch_size": 16}, UnsupportedError, "encoder_patch_size 16"),
    "a tolerance of nothing": (LFM | {"max_pixels_tolerance": 0}, FormatError, "tolerance is 0"),
    "tiles cropped": (GOT | {"crop_size": 9}, UnsupportedError, "keys crop_size"),
    "more tiles than are tried": (GOT | {"max_patches": 65}, FormatError, "max_tiles is 65; expected an integer from 1 to 64"),
    "fewer tiles at most": (GOT | {"min_patches": 13}, FormatError, "min_tiles is 13, above max_tiles, 12"),
    "a longest edge as text": (TILES | {"size": {"longest_edge": "9"}}, FormatError, "longest_edge is '9'"),
    "means of other patches": (GEMMA_4 | {"pooling_kernel_size": 3}, UnsupportedError, "pooling_kernel_size 3"),
    "no tokens": (GEMMA_4 | {"pooling_kernel_size": 2, "max_soft_tokens": 0}, FormatError, "max_soft_tokens is 0"),
    "a mean of text to fold": (
        GEMMA_4 | {"pooling_kernel_size": 2, "do_normalize": True, "image_mean": "abc"},
        FormatError,
        "image_mean or image_std",
    ),
    "pan and scan": (
        {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True},
        UnsupportedError,
        "do_pan_and_scan True",
    ),
    "huge": (QWEN | {"max_pixels": 1 << 40}, FormatError, "max_pixels is 1099511627776"),
    "negative": (QWEN | {"min_pixels": -1}, FormatError, "min_pixels is -1"),
    "above": (QWEN | {"min_pixels": 1 << 25, "max_pixels": 1 << 24}, FormatError, "above max_pixels"),
    "text": (QWEN | {"min_pixels": "3136"}, FormatError, "min_pixels is '3136'"),
    "four means": (CLIP | {"image_mean": [0.5] * 4}, FormatError, "expected three numbers"),
    "a mean of text": (CLIP | {"image_mean": ["a"] * 3}, FormatError, "mean is 'a'"),
    "no spread": (CLIP | {"image_std": [0, 1, 1]}, FormatError, "std is 0"),
    "nan": (CLIP | {"image_std": [float("nan")] * 3}, FormatError, "std is nan"),
    "rescale": (CLIP | {"rescale_factor": 1e9}, FormatError, "rescale"),
    "zero edge": (SIGLIP | {"size": {"height": 0, "width": 384}}, FormatError, "height is 0"),
}


@pytest.mark.parametrize("name", READ)
def test_settings_of_published_checkpoints_are_read(name: str) -> None:
    data, expected = READ[name]
    found = ImageConfig.from_preprocessor(data, SIZES if "Qwen" in str(data) else {"patch_size": 14})
    assert {key: getattr(found, key) for key in expected} == expected
    if "mean" not in expected:
        assert found.mean == (CLIP_MEAN if data.get("image_processor_type") != "SiglipImageProcessor" else (0.5,) * 3)


@pytest.mark.parametrize("name", REFUSED)
def test_other_settings_are_refused_by_name(name: str) -> None:
    data, kind, message = REFUSED[name]
    with pytest.raises(EdgeqError, match=message) as found:
        ImageConfig.from_preprocessor(data, SIZES)
    assert type(found.value) is kind


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"sizing": "mosaic"}, "image sizing 'mosaic'"),
    "no tile": ({"sizing": "tiles", "min_pixels": 0, "max_pixels": 0, "longest_edge": 4}, "image tile is 0"),
    "tiles without end": (
        {"sizing": "tiles", "min_pixels": 0, "max_pixels": 0, "longest_edge": 4096, "tile": 1},
        "longest_edge is 4096; expected at most 32 times tile",
    ),
    "tiles larger together than a picture may be": (
        {"sizing": "aspect", "min_pixels": 0, "max_pixels": 0, "tile": 8192, "min_tiles": 1, "max_tiles": 2},
        "2 tiles of 8192 x 8192 pixels; expected at most 67108864",
    ),
    "tiles that are not used": ({"max_tiles": 6}, "max_tiles is 6"),
    "an edge of no tiles": ({"least_edge": 7}, "least_edge is 7"),
    "a tolerance that is not used": ({"tolerance": 2.0}, "tolerance is 2.0"),
    "a tile that is not used": ({"tile": 14}, "image tile is 14"),
    "filter": ({"resampling": "x" * 1000}, "image resampling"),
    "pixels": ({"max_pixels": 1 << 50}, "max_pixels"),
    "no pixels": ({"min_pixels": 0}, "min_pixels is 0"),
    "true": ({"min_pixels": True}, "min_pixels is True"),
    "an edge that is not used": ({"height": 5}, "height is 5"),
    "a mean of nested lists": ({"mean": [[1], [2], [3]]}, "mean is"),
    "infinity": ({"std": [float("inf")] * 3}, "std is inf"),
    "key": ({"newer": 1}, "unknown keys newer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_settings_of_a_file_are_refused(name: str) -> None:
    sound = {"sizing": "factor", "mean": list(CLIP_MEAN), "std": list(CLIP_STD), "min_pixels": 784, "max_pixels": 50176}
    assert ImageConfig.from_json(sound, "config vision image").std == CLIP_STD
    changed, message = HOSTILE[name]
    with pytest.raises(EdgeqError, match=message):
        ImageConfig.from_json(sound | changed, "config vision image")


def test_settings_that_are_missing_are_named() -> None:
    with pytest.raises(FormatError, match="config vision image lacks mean, std"):
        ImageConfig.from_json({"sizing": "factor"}, "config vision image")
    with pytest.raises(FormatError, match="not a JSON object"):
        ImageConfig.from_json(None, "config vision image")
