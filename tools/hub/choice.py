"""Which files of a repository are a model, and which model a name means.

Types are read from the names of files, as every program that fetches from the hub does: a repository says nothing else of its
files before they are fetched.  What a file holds is read from the file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgeq.errors import CheckpointError
from edgeq.tools.hub.names import HubName

USUAL = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q5_0", "Q8_0")
"""Types of which the first that a repository has is taken where no other is asked for; Q4_K_M is the usual default."""
MAX_SHOWN = 24
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32))$", re.IGNORECASE)
TOWER_TYPES = ("Q8_0", "F16", "BF16", "F32")
"""Types of towers, of which the first that a repository has is taken: the smallest, of types that lose next to nothing."""
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# Beside a language model: its vision tower, and what its quantizer measured.
_TOWER = re.compile(r"mmproj", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class RepositoryFile:
    """A file by its path in the repository.

    size     bytes
    digest   SHA-256 in hexadecimal, or of a small file that git holds itself its SHA-1 there; "": not known
    """

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class HubModel:
    """A model of a repository: one file, or the parts of a GGUF file that was split, in their order.

    quant   its type by its name, in capitals, or else the name of the file
    """

    quant: str
    files: tuple[RepositoryFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def converted(self) -> bool:
        """Whether it is an .edgeq file."""
        return self.files[0].path.endswith(".edgeq")

    def is_called(self, quant: str) -> bool:
        """Whether it is of this type, or its file has this name; upper and lower case are the same."""
        asked, path = quant.casefold(), PurePosixPath(self.files[0].path)
        names = {self.quant.casefold(), self.quant.casefold().removeprefix("ud-"), str(path).casefold(), path.name.casefold()}
        stem = path.stem.casefold()
        return asked in names | {stem} or self.converted and stem.endswith((f"-{asked}", f".{asked}", f"_{asked}"))


def models_in(files: Iterable[RepositoryFile]) -> list[HubModel]:
    """The models among the files of a repository: .edgeq files, then GGUF files, by name.

    A split file of which parts are missing is none.
    """
    converted, parts = list[HubModel](), defaultdict[tuple[str, int], list[RepositoryFile]](list)
    for file in sorted(files, key=lambda file: file.path):
        path = PurePosixPath(file.path)
        if path.suffix.casefold() == ".edgeq":
            converted.append(HubModel(path.stem, (file,)))
        elif path.suffix.casefold() == ".gguf" and not _NO_MODEL.search(path.name):
            part = _PART.fullmatch(path.stem)
            parts[str(path.with_name(part["name"] if part else path.stem)), int(part["count"]) if part else 1].append(file)
    split = [
        HubModel(_type_of(PurePosixPath(name).name), tuple(each)) for (name, count), each in parts.items() if len(each) == count
    ]
    return converted + split


def tower_in(files: Iterable[RepositoryFile], model: HubModel) -> HubModel | None:
    """The file that may be the vision tower of a GGUF file, by its name; what it holds it says itself.  None: there is none.

    Those in the model's folder come first, then those of TOWER_TYPES in their order.
    """
    found = [file for file in files if file.path.casefold().endswith(".gguf") and _TOWER.search(PurePosixPath(file.path).name)]

    def rank(file: RepositoryFile) -> tuple[bool, int, str]:
        path = PurePosixPath(file.path)
        kind = _type_of(path.stem)
        place = TOWER_TYPES.index(kind) if kind in TOWER_TYPES else len(TOWER_TYPES)
        return path.parent != PurePosixPath(model.files[0].path).parent, place, file.path

    return HubModel("mmproj", (min(found, key=rank),)) if found else None


def _type_of(stem: str) -> str:
    found = _TYPE.search(stem)
    return found[1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else stem


def chosen(name: HubName, models: Sequence[HubModel]) -> HubModel | None:
    """The model that a name means; None: there is none at all.

    .edgeq files come first, then GGUF files; without a type the only one, or the first of USUAL.

    CheckpointError: none of this name, or several; the message lists what there is.
    """
    for converted in (True, False):
        kind = [model for model in models if model.converted is converted]
        if name.quant:
            exact = [model for model in kind if model.quant.casefold() == name.quant.casefold()]
            found = exact or [model for model in kind if model.is_called(name.quant)]
        else:
            usual = next((quant for quant in USUAL if any(model.quant == quant for model in kind)), None)
            found = kind if converted or len(kind) == 1 else [model for model in kind if model.quant == usual]
            if kind and not found:
                raise CheckpointError(f"{name}: say which model, as hf:{name.repository}:QUANT; there are {listed(models)}")
        if len(found) > 1:
            which = f"hf:{name.repository}:FILE with the name of one of"
            raise CheckpointError(f"{name}: more than one model is meant; give {which} {listed(found, by_path=True)}")
        if found:
            return found[0]
    if models:
        raise CheckpointError(f"{name}: no model {name.quant!r} in this repository; there are {listed(models)}")
    return None


def listed(models: Sequence[HubModel], by_path: bool = False) -> str:
    """Types, or paths, with their sizes."""
    shown = [f"{model.files[0].path if by_path else model.quant} ({model.size / 1e6:,.0f} MB)" for model in models[:MAX_SHOWN]]
    more = len(models) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
