"""Settings of transformers' image processors, in a checkpoint's preprocessor_config.json, as fields of ImageConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeq.errors import FormatError, UnsupportedError

RESAMPLINGS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By Pillow's numbers, which preprocessor_config.json has."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
GEMMA = "Gemma3ImageProcessor"
"""As SigLIP's, unless it cuts long pictures ("pan and scan")."""
QWEN, CLIP, SIGLIP = "Qwen2VLImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"
PI0 = "PI0ImageProcessor"
"""As SigLIP's for pictures as wide as high; others it pads, which a policy refuses."""
LLAVA = "LlavaImageProcessor"
"""As CLIP's, unless it pads."""
IDEFICS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
"""Which cut into tiles, and pad nothing: all tiles have one size."""
GOT = "GotOcr2ImageProcessor"
"""InternVL's, which always cuts into tiles with it."""
LFM = "Lfm2VlImageProcessor"
"""Which cuts large pictures alone."""
GEMMA_4 = "Gemma4ImageProcessor"
"""Whose pixels v, from 0 to 1 as it leaves them, the tower reads as 2 v - 1."""
DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
    CLIP: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 224}, "crop_size": 224},
    LLAVA: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 224}, "crop_size": 224},
    SIGLIP: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"height": 224, "width": 224}},
    PI0: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"max_height": 224, "max_width": 224}, "do_pad": True},
    GEMMA: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "size": {"height": 224, "width": 224}, "resample": 2},
    GOT: {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"height": 384, "width": 384}}
    | {"min_patches": 1, "max_patches": 12},
    LFM: {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "resample": 2, "do_pad": True, "do_image_splitting": True}
    | {"min_tiles": 2, "max_tiles": 10, "tile_size": 512, "min_image_tokens": 64, "max_image_tokens": 256}
    | {"max_pixels_tolerance": 2.0, "encoder_patch_size": 16, "downsample_factor": 2},
    GEMMA_4: {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3, "do_normalize": False}
    | {"max_soft_tokens": 280, "pooling_kernel_size": 3, "patch_size": 16},
    **dict.fromkeys(
        IDEFICS,
        {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "resample": 1, "do_pad": True}
        | {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
}
"""Values of keys that a preprocessor_config.json may leave out, by `image_processor_type`."""
IGNORED = ("processor_class", "image_processor_type", "feature_extractor_type", "_valid_processor_keys", "do_convert_rgb",
           "auto_map", "data_format", "input_data_format", "device", "return_tensors", "default_to_square",
           "disable_grouping", "num_frames", "max_frames", "min_frames", "fps", "video_sampling",
           "return_row_col_info", "crop_to_patches", "image_seq_length", "pan_and_scan_min_crop_size",
           "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")  # fmt: skip
"""Keys without influence on the pixels of a picture: it is always converted to RGB."""
NEUTRAL = {"do_resize": True, "do_pad": False, "pad_size": None, "use_square_size": False, "do_pan_and_scan": False}
SIZES = {"patch_size", "temporal_patch_size", "merge_size"}
MAX_TOKENS = 1 << 20
"""The most of what the processors of LFM2-VL and Gemma 4 count: tokens, tiles, pixels of an edge."""


def fields_of(data: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Fields of ImageConfig by the settings of a preprocessor_config.json.

    sizes   `patch_size`, `temporal_patch_size` and `merge_size` of the vision tower; where the file has them too they must
            be the same

    UnsupportedError: another processor, or a key or a value that is not supported.  FormatError: not sound.
    """
    if not isinstance(data, dict):
        raise FormatError("preprocessor_config.json is not a JSON object")
    found = data.get("image_processor_type", data.get("feature_extractor_type"))
    kind = str(found).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if kind not in DEFAULTS:
        raise UnsupportedError(
            f"preprocessor_config.json: image_processor_type {found!r:.80} is not supported; supported: {', '.join(DEFAULTS)}"
        )
    given = {**DEFAULTS[kind], **{key: value for key, value in data.items() if key not in IGNORED and value is not None}}
    neutral: dict[str, Any] = NEUTRAL | ({"do_pad": True, "do_image_splitting": True} if kind in IDEFICS else {})
    if kind == LFM:
        # Neither of `size`, which it does not read, nor of what follows from other keys.
        given = {key: value for key, value in given.items() if key not in ("size", "max_num_patches")}
        neutral |= {"do_pad": True, "use_thumbnail": True, "encoder_patch_size": sizes.get("patch_size", 1)}
        neutral |= {"downsample_factor": sizes.get("merge_size", 1)}
    if kind == GEMMA_4:
        neutral["pooling_kernel_size"] = sizes.get("merge_size", 1)
        # It reads no `size`, and base classes write one.
        given = {key: value for key, value in given.items() if key != "size"}
    if kind == PI0:
        size = given["size"] if isinstance(given["size"], dict) else {}
        neutral |= {"do_pad": True, "pad_size": given.get("pad_size")}
        given["size"] = {key: size.get(f"max_{key}") for key in ("height", "width")}
    for key, expected in [*neutral.items(), *((key, sizes.get(key, 1)) for key in sorted(SIZES))]:
        if (value := given.pop(key, expected)) != expected:
            raise UnsupportedError(f"preprocessor_config.json: {key} {value!r:.80} is not supported; only {expected!r} is")
    rescale, normalize = given.pop("do_rescale", True), given.pop("do_normalize", True)
    factor, mean, std = given.pop("rescale_factor", 1 / 255), given.pop("image_mean"), given.pop("image_std")
    number = given.pop("resample", 3)
    if type(number) is not int or not 0 <= number < len(RESAMPLINGS):
        raise UnsupportedError(f"preprocessor_config.json: resample {number!r:.80} is not supported; expected 0 to 5")
    size = _sizes(kind, given, sizes)
    if given:
        raise UnsupportedError(f"preprocessor_config.json: keys {', '.join(sorted(map(str, given)))} are not supported")
    mean, std = (_three(mean), _three(std)) if normalize else ((0.0,) * 3, (1.0,) * 3)
    if kind == GEMMA_4:
        mean, std = _doubled(mean, std)
    return {
        "mean": mean,
        "std": std,
        "resampling": RESAMPLINGS[number],
        "rescale": factor if rescale else 1.0,
        **size,
    }


def _sizes(kind: str, given: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Fields that say what size a picture gets, from keys that are removed from `given`."""
    if kind == LFM:
        return _large(given, sizes)
    if kind == GEMMA_4:
        tokens = _count("max_soft_tokens", given.pop("max_soft_tokens"))
        return {"sizing": "budget", "max_pixels": tokens * (sizes.get("patch_size", 1) * sizes.get("merge_size", 1)) ** 2}
    size = given.pop("size")
    if kind in IDEFICS:
        edges = {"size": size, "max_image_size": given.pop("max_image_size")}
        for key, value in edges.items():
            if not isinstance(value, dict) or set(value) != {"longest_edge"}:
                raise UnsupportedError(f"preprocessor_config.json: {key} {value!r:.80} is not supported; expected longest_edge")
        longest, tile = (value["longest_edge"] for value in edges.values())
        return {"sizing": "tiles", "longest_edge": longest, "tile": tile}
    if kind == QWEN:
        # Files before transformers 5 have the limits outside `size`.
        edges = size if isinstance(size, dict) else {}
        least, most = (edges.get(key, DEFAULTS[QWEN]["size"][key]) for key in ("shortest_edge", "longest_edge"))
        least = given.pop("min_pixels", edges.get("min_pixels", least))
        most = given.pop("max_pixels", edges.get("max_pixels", most))
        return {"sizing": "factor", "min_pixels": least, "max_pixels": most}
    if kind == GOT:
        # Keys without use here that its published files have.
        for key in ("crop_size", "do_center_crop"):
            if given.get(key) is None:
                given.pop(key, None)
        height, width = _edges("size", size)
        if height != width:
            raise UnsupportedError(f"preprocessor_config.json: size {height} x {width} is not supported; expected a square")
        least, most = given.pop("min_patches"), given.pop("max_patches")
        return {"sizing": "aspect", "tile": height, "min_tiles": least, "max_tiles": most}
    crop, crops = given.pop("crop_size", None), given.pop("do_center_crop", kind in (CLIP, LLAVA))
    if not crops:
        height, width = _edges("size", size)
        return {"sizing": "fixed", "height": height, "width": width}
    edge = size.get("shortest_edge") if isinstance(size, dict) and set(size) == {"shortest_edge"} else size
    height, width = _edges("crop_size", crop)
    return {"sizing": "crop", "shortest_edge": edge, "height": height, "width": width}


def _large(given: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """`_sizes` of LFM2-VL's processor."""
    keys = ("min_image_tokens", "max_image_tokens", "tile_size", "min_tiles", "max_tiles")
    found = {key: given.pop(key) for key in keys}
    for key, value in found.items():
        _count(key, value)
    patch = sizes.get("patch_size", 1)
    edge = patch * sizes.get("merge_size", 1)
    least, most, tile, fewest, tiles = found.values()
    if given.pop("do_image_splitting") is False:
        fewest = tiles = 1
    if fewest == 1 < tiles:
        raise UnsupportedError(
            f"preprocessor_config.json: min_tiles 1 with max_tiles {tiles} is not supported: of one tile the processor makes "
            "other pixels than tokens; expected 2, or 1 for both"
        )
    if tile % edge:
        raise UnsupportedError(f"preprocessor_config.json: tile_size {tile} is not supported; expected a multiple of {edge}")
    pixels = {"min_pixels": least * edge**2, "max_pixels": most * edge**2, "least_edge": patch}
    tolerance = given.pop("max_pixels_tolerance")
    return {"sizing": "large", "tile": tile, "min_tiles": fewest, "max_tiles": tiles, "tolerance": tolerance, **pixels}


def _count(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise FormatError(f"preprocessor_config.json: {key} is {value!r:.80}; expected an integer from 1 to {MAX_TOKENS}")
    return int(value)


def _doubled(mean: Any, std: Any) -> tuple[Any, Any]:
    """Mean and deviation of 2 v - 1, of those of v; FormatError: they are no numbers."""
    for value in (*mean, *std):
        if type(value) not in (int, float):
            raise FormatError(f"preprocessor_config.json: image_mean or image_std has {value!r:.80}; expected numbers")
    return tuple(m + s / 2 for m, s in zip(mean, std, strict=False)), tuple(s / 2 for s in std)


def _edges(key: str, size: Any) -> tuple[Any, Any]:
    """Height and width of {"height": h, "width": w}, or of a number."""
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        return size["height"], size["width"]
    if type(size) is int:
        return size, size
    raise UnsupportedError(f"preprocessor_config.json: {key} {size!r:.80} is not supported; expected height and width")


def _three(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3
