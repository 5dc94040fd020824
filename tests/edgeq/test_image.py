"""Pictures become the pixels that transformers' processors make of them; hostile ones end in one line."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edgeq.errors import InputError
from edgeq.network.image_config import ImageConfig
from edgeq.pictures.image import EXACT_PIXELS, MAX_PIXELS, PICTURE_LIMITS, Picture, read_picture
from edgeq.pictures.preprocessor import CLIP_MEAN, CLIP_STD

MODES = ("RGB", "L", "1", "P", "P with alpha", "LA", "RGBA", "CMYK")
SIZES = ((1, 1), (1, 2), (3, 1), (27, 41), (140, 56), (13, 2000), (401, 300))
EVERY = 10**9
QWEN = ImageConfig(sizing="factor", mean=CLIP_MEAN, std=CLIP_STD, min_pixels=784, max_pixels=50176)


def tower(image: ImageConfig, merge: int = 2, frames: int = 2) -> Any:
    """What `read_picture` reads of a VisionConfig."""
    sizes = {"patch_size": 14, "merge": merge, "temporal_patch_size": frames, "token_edge": 14 * merge}
    return SimpleNamespace(image=image, class_feature=False, **sizes)


def drawn(mode: str, width: int, height: int) -> Image.Image:
    if mode.startswith("P"):
        return drawn("RGBA" if "alpha" in mode else "RGB", width, height).quantize(32)
    count = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, count), np.uint8)
    return (
        Image.fromarray(values[..., 0]).convert("1")
        if mode == "1"
        else Image.frombytes(mode, (width, height), values.tobytes())
    )


def stored(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def processor(kind: str) -> tuple[Any, Any]:
    """A processor of transformers, and a tower with the settings that its preprocessor_config.json has."""
    if kind == "qwen2-vl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Qwen

        made = Qwen(size={"shortest_edge": 784, "longest_edge": 50176})
    elif kind == "clip":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as Clip

        made = Clip(size={"shortest_edge": 60}, crop_size={"height": 56, "width": 42})
    elif kind == "llava":
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil as Llava

        made = Llava(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    elif kind in ("idefics3", "smolvlm"):
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Idefics
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as SmolVlm

        sizes: dict[str, Any] = {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 42}}
        made = Idefics(**sizes) if kind == "idefics3" else SmolVlm(**sizes)
    elif kind == "got-ocr2":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil as GotOcr

        # InternVL's processor says that pictures are cut.
        made = GotOcr(size={"height": 42, "width": 42}, max_patches=6, crop_to_patches=True)
    else:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil as Siglip

        made = Siglip(size={"height": 56, "width": 42}, resample=2)
    merge = 2 if kind == "qwen2-vl" else 1
    sizes = {"patch_size": 14, "merge_size": merge, "temporal_patch_size": merge}
    return made, tower(ImageConfig.from_preprocessor(json.loads(made.to_json_string()), sizes), merge, merge)


def compare(kind: str, mode: str, width: int, height: int) -> None:
    made, vision = processor(kind)
    data = stored(drawn(mode, width, height), "JPEG" if mode == "CMYK" else "PNG")
    found = read_picture(data, vision, EVERY)
    expected = made(images=[Image.open(io.BytesIO(data))], return_tensors="np")
    pixels = expected["pixel_values"]
    if found.tiles:
        pixels = pixels if kind == "got-ocr2" else pixels[0]
        assert len(found.tiles) == len(pixels) and found.tiles[-1].whole and not any(x.whole for x in found.tiles[:-1])
        assert math.prod(found.tiling) + 1 == len(found.tiles)
        assert kind != "got-ocr2" or len(found.tiles) == expected["num_patches"][0]
        patches = [x.reshape(3, 3, 14, 3, 14).transpose(1, 3, 0, 2, 4).reshape(9, -1) for x in pixels]
        assert all(np.abs(x.patches - y).max() <= 1e-6 for x, y in zip(found.tiles, patches, strict=True))
        return
    if kind == "qwen2-vl":
        assert found.grid == tuple(expected["image_grid_thw"][0].tolist())
    else:
        rows, columns = found.grid[1:]
        pixels = pixels.reshape(3, rows, 14, columns, 14).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    assert found.size == (width, height)
    assert found.patches.shape == pixels.shape and found.patches.dtype == np.float32
    assert np.abs(found.patches - pixels).max() <= 1e-6


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("qwen2-vl", "RGB"), ("qwen2-vl", "LA"), ("clip", "P with alpha"), ("siglip", "RGB")]
    + [("idefics3", "RGB"), ("smolvlm", "LA"), ("got-ocr2", "RGB")],
)
def test_pixels_are_those_of_transformers(kind: str, mode: str) -> None:
    compare(kind, mode, 57, 40)


KINDS = ("qwen2-vl", "clip", "llava", "siglip", "idefics3", "smolvlm", "got-ocr2")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "mode", "size"),
    [
        # Every kind with every mode, in sizes by turns: every two of the three meet.
        pytest.param(kind, mode, SIZES[(i + j) % len(SIZES)], id=f"{kind}-{mode}-{SIZES[(i + j) % len(SIZES)]}")
        for i, kind in enumerate(KINDS)
        for j, mode in enumerate(MODES)
    ],
)
def test_pixels_are_those_of_transformers_everywhere(kind: str, mode: str, size: tuple[int, int]) -> None:
    compare(kind, mode, *size)


def test_tiles_are_those_of_transformers_for_pictures_of_every_shape() -> None:
    """Where a side is rounded, and where a picture is larger than what is ever cut."""
    from transformers.models.idefics3 import image_processing_pil_idefics3 as theirs

    for longest, edge in ((2048, 512), (1920, 384), (1456, 364), (5000, 980), (90, 30), (30, 30), (99, 33)):
        made = theirs.Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": edge})
        settings = ImageConfig.from_preprocessor(json.loads(made.to_json_string()), {"patch_size": 14})
        for height, width in np.random.default_rng(longest).integers(1, 4000, (40, 2)).tolist():
            if max(height, width) > 200 * min(height, width):
                continue
            found = settings.tiling(height, width, 1, EVERY)
            first = theirs.get_resize_output_image_size(np.zeros((1, height, width)), longest)
            assert found.first == first, (height, width)
            asked: list[Any] = []
            made.resize = lambda image, size, resample, asked=asked: asked.append((size.height, size.width))  # type: ignore[method-assign]
            made.resize_for_vision_encoder(np.zeros((1, *first), np.uint8), edge)
            assert asked == [found.size]
            assert found.pieces <= settings.most_tokens(edge)
            assert (found.rows * edge, found.columns * edge) == (found.size if found.pieces > 1 else (0, 0))


def test_sizes_and_tiles_of_large_pictures_are_those_of_transformers() -> None:
    """As published, and with settings by which edges of less than a patch and proportions between two tilings count."""
    from tests.edgeq import lfm2_vl_processor

    theirs = lfm2_vl_processor.processor()
    given: tuple[dict[str, Any], ...] = (
        {},
        {"max_tiles": 4, "min_image_tokens": 200, "tile_size": 256},
        {"max_image_tokens": 4, "min_image_tokens": 1, "max_pixels_tolerance": 1.0, "tile_size": 64},
        {"do_image_splitting": False},
    )
    counts = []
    for number, other in enumerate(given):
        kinds = {"min_image_tokens": 64, "max_image_tokens": 256, "max_pixels_tolerance": 2.0, **other}
        settings = ImageConfig.from_preprocessor(
            {"image_processor_type": "Lfm2VlImageProcessorFast", **kinds}, {"patch_size": 16, "merge_size": 2}
        )
        shapes = np.random.default_rng(number).integers(1, 2500, (60, 2)).tolist()
        for height, width in [*shapes, (800, 2000), (2000, 800), (7, 900), (15, 300), (16, 300), (40, 16), (32, 33)]:
            if max(height, width) > 200 * min(height, width):
                continue
            sizes = {"downsample_factor": 2, "encoder_patch_size": 16}
            limits = {key: kinds[key] for key in ("min_image_tokens", "max_image_tokens")}
            found = settings.tiling(height, width, 32, EVERY)
            columns, rows = theirs.smart_resize(height, width, **sizes, **limits)
            whole = found.whole if found.pieces > 1 else found.size
            assert whole == (rows, columns), (height, width)
            large = {key: kinds[key] for key in ("max_image_tokens", "max_pixels_tolerance")}
            cut = "do_image_splitting" not in kinds and theirs._is_image_too_large(height, width, **sizes, **large)
            assert (found.pieces > 1) == cut, (height, width)
            if cut:
                tile = kinds.get("tile_size", 512)
                grid = theirs._get_grid_layout(height, width, 2, kinds.get("max_tiles", 10), tile)
                assert (found.columns, found.rows, found.size[1], found.size[0]) == grid[:4], (height, width)
            tokens = found.rows * found.columns * (settings.tile // 32) ** 2 + whole[0] * whole[1] // 1024
            assert tokens <= settings.most_tokens(32)
            counts.append((number, cut))
    assert {(0, True), (0, False), (2, True), (3, False)} <= set(counts) and (3, True) not in counts


@pytest.mark.parametrize(("most", "pieces"), [(1, 1), (6, 1), (9, 1), (10, 1), (13, 1), (14, 3), (21, 3), (22, 5), (99, 5)])
def test_a_large_picture_never_has_more_tokens_than_it_may(most: int, pieces: int) -> None:
    settings = ImageConfig(
        sizing="large", mean=(0.5,) * 3, std=(0.5,) * 3, tile=28, min_tiles=2, max_tiles=4, min_pixels=392, max_pixels=1176,
        tolerance=2.0, least_edge=7,
    )  # fmt: skip
    found = read_picture(drawn("RGB", 96, 64), tower(settings, 1, 1), most)
    assert len(found.tiles) == pieces and sum(len(each.patches) for each in found.pieces) <= most
    assert len(found.notes) == (most < 22) and (not found.notes or f"for at most {most} tokens" in found.notes[0])


def test_tiles_by_aspect_are_those_of_transformers_for_pictures_of_every_shape() -> None:
    """Ties too: which of two as near proportions is taken depends on how large the picture is."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    for least, most in ((1, 12), (2, 6), (1, 1), (3, 40)):
        settings = ImageConfig(
            sizing="aspect", mean=(0.5,) * 3, std=(0.5,) * 3, tile=448, min_tiles=least, max_tiles=most
        )  # fmt: skip
        shapes = np.random.default_rng(most).integers(30, 3000, (60, 2)).tolist()
        for height, width in [*shapes, (448, 448), (630, 640), (640, 640), (300, 600), (700, 1400), (1400, 700)]:
            columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            found = settings.tiling(height, width, 28, EVERY)
            assert found.size == found.first == (448 * rows, 448 * columns), (height, width)
            assert (found.rows, found.columns) == ((rows, columns) if rows * columns > 1 else (0, 0))
            assert found.pieces * 256 <= settings.most_tokens(28)


@pytest.mark.parametrize(("most", "pieces"), [(9, 1), (26, 1), (27, 3), (44, 3), (45, 5), (62, 5), (63, 7)])
def test_a_picture_cut_by_aspect_never_has_more_tokens_than_it_may(most: int, pieces: int) -> None:
    settings = ImageConfig(sizing="aspect", mean=(0.5,) * 3, std=(0.5,) * 3, tile=42, min_tiles=1, max_tiles=6)
    found = read_picture(drawn("RGB", 96, 64), tower(settings, 1, 1), most)
    assert len(found.tiles) == pieces and (found.notes == ()) == (pieces == 7)


@pytest.mark.parametrize(("most", "pieces"), [(9, 1), (44, 1), (45, 5), (89, 5), (90, 10), (152, 10), (153, 17)])
def test_a_picture_in_tiles_never_has_more_tokens_than_it_may(most: int, pieces: int) -> None:
    settings = ImageConfig(sizing="tiles", mean=(0.5,) * 3, std=(0.5,) * 3, tile=42, longest_edge=168)
    found = read_picture(drawn("RGB", 100, 90), tower(settings, 1, 1), most)
    whole = read_picture(drawn("RGB", 100, 90), tower(settings, 1, 1), EVERY)
    assert len(whole.tiles) == 17 and len(found.tiles) == pieces
    assert (found.notes == ()) == (found.tiling == whole.tiling) and len({tile.digest for tile in whole.tiles}) == 17
    assert found.nbytes == sum(tile.nbytes for tile in found.tiles)
    with pytest.raises(InputError, match="every picture has at least 9 tokens for this model, and 8 are allowed"):
        read_picture(drawn("RGB", 10, 10), tower(settings, 1, 1), 8)


def test_patches_are_in_the_order_of_the_tower() -> None:
    """Two by two patches of a token follow one another, and every patch has its frame twice."""
    values = np.arange(56 * 84 * 3).reshape(56, 84, 3) % 251
    plain = ImageConfig(sizing="fixed", mean=(0.0,) * 3, std=(1.0,) * 3, rescale=1.0, height=56, width=84)
    found = read_picture(Image.fromarray(values.astype(np.uint8)), tower(plain), EVERY)
    assert found.grid == (1, 4, 6)
    order = [(2 * row + y, 2 * column + x) for row in range(2) for column in range(3) for y in range(2) for x in range(2)]
    for patch, (row, column) in zip(found.patches.reshape(-1, 3, 2, 14, 14), order, strict=True):
        expected = values[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1)
        assert (patch[:, 0] == expected).all() and (patch[:, 1] == expected).all()


@pytest.mark.usefixtures("works_here")
def test_exif_turns_a_picture() -> None:
    image = drawn("RGB", 60, 90)
    upright = read_picture(stored(image, "PNG"), tower(QWEN), EVERY)
    for orientation, stored_as in (
        (6, Image.Transpose.ROTATE_90),
        (3, Image.Transpose.ROTATE_180),
        (5, Image.Transpose.TRANSPOSE),
    ):
        exif = Image.Exif()
        exif[0x112] = orientation
        found = read_picture(stored(image.transpose(stored_as), "PNG", exif=exif), tower(QWEN), EVERY)
        assert found.size == (60, 90)
        assert (found.patches == upright.patches).all() and found.digest == upright.digest


@pytest.mark.usefixtures("works_here")
def test_sixteen_bits_are_scaled_to_eight() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (40, 40)).astype(np.uint16)
    deep = read_picture(stored(Image.fromarray(values), "PNG"), tower(QWEN), EVERY)
    assert (deep.patches == read_picture(Image.fromarray((values >> 8).astype(np.uint8)), tower(QWEN), EVERY).patches).all()


@pytest.mark.usefixtures("works_here")
def test_a_wrong_suffix_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(stored(drawn("RGB", 30, 30), "GIF"))
    assert read_picture(path, tower(QWEN), EVERY).size == (30, 30)


@pytest.mark.usefixtures("works_here")
def test_the_first_frame_of_an_animation_is_read_and_that_is_said() -> None:
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "green", "blue")]
    found = read_picture(stored(frames[0], "GIF", save_all=True, append_images=frames[1:]), tower(QWEN), EVERY)
    assert found.notes == ("picture: 3 frames; only the first is read",)
    assert (found.patches == read_picture(frames[0], tower(QWEN), EVERY).patches).all()


def test_pictures_have_different_digests_where_pixels_or_shapes_differ() -> None:
    white = [read_picture(Image.new("RGB", size, "white"), tower(QWEN), EVERY) for size in ((56, 28), (28, 56), (56, 28))]
    black = read_picture(Image.new("RGB", (56, 28)), tower(QWEN), EVERY)
    assert len({picture.digest for picture in (*white, black)}) == 3 and white[0].digest == white[2].digest


@pytest.mark.parametrize("size", [(28, 28), (400, 300), (5600, 28), (28, 5600), (3, 600), (1, 1)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_a_picture_never_has_more_tokens_than_it_may(size: tuple[int, int], most: int) -> None:
    found = read_picture(Image.new("RGB", size), tower(QWEN), most)
    assert 1 <= len(found.patches) // 4 <= most
    file_limit = read_picture(Image.new("RGB", size), tower(QWEN), QWEN.most_tokens(28))
    shrunk = len(file_limit.patches) > 4 * most
    assert (found.notes != ()) == shrunk
    if shrunk:
        assert f"for at most {most} tokens" in found.notes[0]


def test_pixels_beyond_the_last_whole_token_are_left_out() -> None:
    """384 pixels are 27 patches of 14, and 13 tokens of two patches."""
    fixed = ImageConfig(sizing="fixed", mean=CLIP_MEAN, std=CLIP_STD, height=384, width=70)
    picture = read_picture(drawn("RGB", 70, 384), tower(fixed), EVERY)
    assert picture.grid == (1, 26, 4) and len(picture.patches) == 26 * 4


def test_a_damaged_picture_that_a_program_opened_is_an_input_error() -> None:
    data = stored(drawn("RGB", 300, 300), "PNG")
    with pytest.raises(InputError, match="picture: the picture is truncated or damaged"):
        read_picture(Image.open(io.BytesIO(data[: len(data) // 2])), tower(QWEN), EVERY)


def test_a_fixed_size_is_refused_where_it_has_too_many_tokens() -> None:
    fixed = ImageConfig(sizing="fixed", mean=CLIP_MEAN, std=CLIP_STD, height=56, width=56)
    with pytest.raises(InputError, match="every picture has 16 tokens for this model, and 15 are allowed"):
        read_picture(Image.new("RGB", (50, 50)), tower(fixed, 1, 1), 15)


def _bomb(tmp_path: Path) -> bytes:
    """A PNG of 89 bytes that says it has 40,000 x 40,000 pixels."""
    data = bytearray(stored(Image.new("RGB", (1, 1)), "PNG"))
    data[16:24] = (40000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda _: b"This is not a picture.", "not a picture that can be read; supported: PNG, JPEG, WebP, GIF, BMP"),
    "tiff": (lambda _: stored(drawn("RGB", 9, 9), "TIFF"), "not a picture that can be read"),
    "truncated png": (lambda _: stored(drawn("RGB", 90, 90), "PNG")[:9000], "truncated or damaged"),
    "truncated jpeg": (lambda _: stored(drawn("RGB", 90, 90), "JPEG")[:3000], "truncated or damaged"),
    "truncated webp": (lambda _: stored(drawn("RGB", 90, 90), "WEBP")[:900], "picture"),
    "truncated gif": (lambda _: stored(drawn("P", 90, 90), "GIF")[:2000], "truncated or damaged"),
    "bomb": (_bomb, "40000 x 40000 pixels; at most 100,000,000 are read"),
    "thin": (lambda _: stored(Image.new("RGB", (1005, 5)), "PNG"), "1005 x 5 pixels: more than 200 times as long as wide"),
    "float": (lambda _: Image.new("F", (9, 9)), "floating-point numbers"),
    "no file": (lambda folder: folder / "none.png", "No such file"),
    "folder": (lambda folder: folder, "a folder"),
    "number": (lambda _: 7, "a picture is int; expected a path, bytes or a PIL.Image.Image"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_sound_picture_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    source, message = HOSTILE[name]
    with pytest.raises(InputError, match=message) as found:
        read_picture(source(tmp_path), tower(QWEN), EVERY)
    assert "\n" not in str(found.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(InputError, match="empty.png: the file is empty"):
        read_picture(tmp_path / "empty.png", tower(QWEN), EVERY)


def test_damaged_exif_leaves_a_picture_as_it_is() -> None:
    data = stored(drawn("RGB", 40, 40), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_picture(data, tower(QWEN), EVERY).size == (40, 40)


def test_a_changed_byte_gives_a_picture_or_one_line() -> None:
    random = np.random.default_rng(1)
    originals = [stored(drawn("RGB", 30, 20), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    for i in range(15):
        data = bytearray(originals[i % len(originals)])
        data[int(random.integers(0, min(64, len(data))))] = int(random.integers(0, 256))
        try:
            assert isinstance(read_picture(bytes(data), tower(QWEN), EVERY), Picture)
        except InputError as error:
            assert len(str(error)) < 300


MEASURED = """
import resource, sys
from io import BytesIO
from PIL import Image
from tests.edgeq.test_image import EVERY, QWEN, read_picture, tower

peaks = []
for size in ((8, 8), (3000, 2000)):
    data = BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGBA").save(data, "PNG", compress_level=1)
    read_picture(data.getvalue(), tower(QWEN), EVERY)
    peaks.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print((peaks[1] - peaks[0]) * (1024 if sys.platform == "linux" else 1) / 6e6)
"""


def test_a_transparent_picture_takes_no_second_one_in_memory() -> None:
    """4 bytes for each pixel as Pillow decodes it, 3 on white; the largest child of a process that has read nothing else."""
    ran = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert 4 < float(ran.stdout) < 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["RGB PNG", "RGBA PNG", "L PNG", "RGB JPEG", "progressive JPEG", "CMYK JPEG"])
def test_a_hundred_million_pixels_are_shrunk_within_8_bytes_each(kind: str) -> None:
    mode, form = kind.split()
    exif = Image.Exif()
    exif[0x112] = 6
    image = Image.linear_gradient("L").resize((10000, 10000)).convert("RGB" if mode == "progressive" else mode)
    options = {"compress_level": 1} if form == "PNG" else {"progressive": mode == "progressive", "subsampling": 0}
    data = stored(image, form, exif=exif, **options)
    del image
    assert PICTURE_LIMITS.memory <= 8 * MAX_PIXELS + (64 << 20)
    found = read_picture(data, tower(QWEN), EVERY)
    # By the rule of Qwen2-VL: 10,000 by its factor is a little less than 8 times 28.
    assert found.grid == (1, 14, 14)
    # The gradient runs from left to right once it is turned.
    values = found.patches.reshape(7, 7, 2, 2, 3, 2, 14, 14)[0, :, 0, 0, 0, 0, 0, 0]
    assert (np.diff(values) < 0).all()


@pytest.mark.usefixtures("works_here")
def test_a_jpeg_above_the_exact_size_is_decoded_smaller() -> None:
    """It still looks the same."""
    image = Image.linear_gradient("L").resize((5000, 4000)).convert("RGB")
    assert image.width * image.height > EXACT_PIXELS
    quick = read_picture(stored(image, "JPEG", quality=95), tower(QWEN), EVERY)
    assert np.abs(quick.patches - read_picture(image.resize((2500, 2000)), tower(QWEN), EVERY).patches).max() < 0.1


WITHOUT = """
import sys
sys.modules["PIL"] = None
from types import SimpleNamespace
from edgeq.errors import EdgeqError
from edgeq.pictures.image import read_picture
try:
    read_picture(b"x", SimpleNamespace(image=None, patch_size=1, merge=1), 1)
except EdgeqError as error:
    print(type(error).__name__, error)
"""


def test_without_pillow_it_says_what_to_install() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == (
        "UnsupportedError pictures are read by Pillow, which is not installed; run `pip install edgeq[vision]`"
    )
