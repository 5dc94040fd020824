"""The interface of a quantization method, and the order in which a conversion calls it.

A conversion goes once through the model: embedding, decoder layers, norm and head.  A `Method` declares first what is stored
and how, so that all sizes are known, and then works on one layer at a time.  The defaults are those of rounding to nearest; a
method overrides what it does differently.  In the order in which they are called:

    __init__     options, family and configuration; refuses what the method cannot do
    stored_config, recipe, dtype, extras, mode, kv
                 what is stored: from the configuration alone
    study        with `studies`: once, through all unquantized layers; the result is kept for a resumed run
    tensors      the checkpoint's tensors, changed where the method changes the whole model
    install      whenever a decoder layer has been loaded: what acts on the inputs of its modules at run time
    prepare      with `calibrates`: changes a loaded layer, or quantizes it
    deliver      what is written of one linear layer

A conversion that was killed resumes at the first step it did not finish.  It ends in the same bytes if everything follows
from the arguments: no state in the method from one layer to the next, no clock, every random number from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from edgeq.converters.budget.part_names import part_of
from edgeq.converters.checkpoint.slabs import RowReader, Tensors
from edgeq.converters.families import Family
from edgeq.converters.planning.method_options import DEFAULTS
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe
from edgeq.converters.rounding.presets import MIN_MAX, Preset, fitting_group_size
from edgeq.format.codec import Codec
from edgeq.format.manifest import MODALITIES
from edgeq.format.records import Activation, KvCodec, Mode
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.stack import Stack

if TYPE_CHECKING:
    from torch import Tensor, nn

    from edgeq.converters.calibration.forward import BlockForward, Forward, TokenForward, WholeReader
    from edgeq.converters.calibration.samples import PictureFile

Study = dict[str, NDArray[Any]]
MODE_OF_BITS: dict[int | None, Mode | None] = {None: None, 16: "a16", 8: "a8", 6: "a8", 4: "a4"}
KV_OF_BITS: dict[int | None, KvCodec] = {
    None: KvCodec(),
    16: KvCodec(),
    8: KvCodec("int8"),
    4: KvCodec("int4"),
    3: KvCodec("int4", bits=3),
}


@dataclass(frozen=True)
class Block:
    """A decoder layer at hand; of a vision tower also its patches and its projector (torch_tower.py).

    index     of the block, in the order of the stack
    module    the block (torch_decoder.py) with its weights in float32, `install` called
    linears   its linear layers as they will be stored, in execution order
    read      rows of its tensors as `module` has them when they are asked for
    forward   `forward.states` are the inputs of this block; `prepare` leaves those of the next there
    warn      takes a line for the user
    prefix    what the names of its tensors begin with, before the paths of modules
    on_part   takes (parts of the work done, parts), of as many parts as the method likes
    exact     with the option `tune`: the unquantized model, whose states `prepare` advances too
    """

    index: int
    module: nn.Module
    linears: tuple[LinearItem, ...]
    read: RowReader
    forward: Forward
    warn: Callable[[str], None]
    prefix: str
    on_part: Callable[[int, int], None] = lambda done, parts: None
    exact: BlockForward | None = None

    def modules(self, item: LinearItem) -> list[nn.Linear]:
        """The modules of whose rows `item` is made, in its order."""
        from torch import nn

        found = []
        for name, _ in item.tensors:
            module = self.module.get_submodule(name.removeprefix(self.prefix).removesuffix(".weight"))
            assert isinstance(module, nn.Linear)
            found.append(module)
        return found


class Method:
    """Base of all methods; the head of this file has the order of the calls.

    name         as in --method; the options that the method has a use for are in edgeq.converters.planning.method_options
    calibrates   needs calibration text; decoder layers go through `prepare`
    propagates   with `calibrates`: the inputs of a layer are the outputs of the layers before it as stored, not as they were; a
                 resumed run then loads finished layers from the unfinished file
    rounds_head  with `calibrates`: the head is rounded by GPTQ over the outputs of the layers, not to nearest
    weighs_tokens  with `calibrates`: decoder layers are rounded by GPTQ, and their inputs are the checkpoint's, each channel
                 times a factor at most: what massive tokens count is tried (probing/massive.py)
    studies      has a `study`
    pools        it can be had for a model that embeds texts: the last norm gives what it gave
    keeps_integers  weights that the source has in integers are stored as they are, head and embedding too; layers that other
                 methods store as one lie apart where their codecs differ
    keeps_channels  inputs and outputs of the layers are those of the checkpoint, but for what a layer does to them itself
    table_bits   of an embedding that was the head too, and no longer is; None: it is stored as it is
    passes       with `calibrates`: how often, about, the calibration text goes through a layer while it is prepared
    effort       how many times the work of plain rounding, about, a weight takes apart from that; both are for progress only
    """

    name: ClassVar[str]
    calibrates: bool = False
    propagates: bool = False
    rounds_head: ClassVar[bool] = False
    weighs_tokens: bool = False
    studies: bool = False
    pools: ClassVar[bool] = True
    keeps_integers: ClassVar[bool] = False
    keeps_channels: bool = False
    table_bits: int | None = None
    passes: ClassVar[int] = 2
    effort: ClassVar[int] = 1

    def __init__(self, options: ConvertOptions, family: Family, stack: Stack) -> None:
        """`stack`: the decoder of the checkpoint, its vision tower, or the layer that drafts.

        UnsupportedError: the method cannot do this one, and why.
        """
        self.options, self.family, self.stack = options.completed(DEFAULTS[self.name]), family, stack
        self.group_size_given = options.group_size is not None

    @property
    def config(self) -> ModelConfig:
        """The decoder, for what is done to one only."""
        assert isinstance(self.stack, ModelConfig)
        return self.stack

    @property
    def widest(self) -> int:
        """The most input channels that a linear layer of the decoder has."""
        c = self.config
        of_layers = ((c.heads_of(i).query_size, c.mlp_size(i)) for i in range(c.num_hidden_layers))
        return max(c.hidden_size, c.shared_expert_intermediate_size, *map(max, of_layers))

    def group_size(self, columns: int) -> int:
        """Columns of a group of a weight with `columns`.

        A size that was asked for is kept, with a shorter last group where it does not divide the columns; of the default the
        largest size is taken that does.
        """
        size = self.options.group_size
        assert size is not None
        return size if self.group_size_given or not size else fitting_group_size(columns, size)

    def codec(self, columns: int) -> Codec:
        """The codec of a weight of a decoder layer, or of its block of `columns`."""
        assert self.options.bits is not None
        if self.options.trellis:
            return Codec("trellis", self.options.bits, self.group_size(columns))
        if self.options.table:
            return Codec("table", self.options.bits, self.group_size(columns))
        if self.options.half:
            return Codec("s4" if self.options.scale_bits == 4 else "half", self.options.bits, self.group_size(columns))
        return Codec("int", self.options.bits, self.group_size(columns), bool(self.options.symmetric))

    def allocated(self, name: str) -> Codec | None:
        """The codec that the allocation gives linear layer `name`; None: there is no allocation, or it is still empty."""
        allocation = self.options.allocation
        return Codec.named(allocation[part_of(name)]) if allocation else None

    @property
    def activation(self) -> Activation | None:
        """How inputs are quantized by the options; None: in blocks of channels, or not at all."""
        bits, kind = self.options.activation_bits, self.options.activations
        return None if kind in (None, "block") or bits in (None, 16) else Activation(bits)

    @property
    def scales(self) -> int:
        """Constant scales that each input has."""
        return {"static": 1, "modality": 1 if isinstance(self.stack, VisionConfig) else MODALITIES}.get(
            self.options.activations or "", 0
        )

    @property
    def preset(self) -> Preset:
        """How integers are chosen; its name goes into the provenance."""
        return MIN_MAX

    @property
    def stored_config(self) -> ModelConfig:
        """The network as it will be stored: a method that folds the last norm into the head unties it."""
        return self.config

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        """The parts of linear layer `name`, such as layers.3.qkv, of a decoder layer; `stored`: how the checkpoint holds it."""
        # In 8 bits the runtime's own scales, a block each, are finer and lose nothing; in 4 a baseline follows its paper.
        four = self.options.activation_bits == 4
        codec = self.allocated(name) or self.codec(columns)
        return Recipe(codec, self.preset, activation=Activation(4, symmetric=False) if four else None)

    def dtype(self, part: str, stored: str) -> str:
        """Type of an array, `stored` in the checkpoint.

        part: embedding or norm; of a decoder layer attention_norm, mlp_norm ..., and qkv.bias ... of a linear layer
        """
        return stored

    def extras(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Arrays that are added to a decoder layer: name in the file -> (dtype, shape).  Their values are rows of `tensors`."""
        return {}

    @property
    def mode(self) -> Mode | None:
        """The mode in which the file runs by default; None: measured, or a16 without text."""
        return MODE_OF_BITS[self.options.activation_bits]

    @property
    def head_activation(self) -> Activation | None:
        """How the input of the head is quantized; None: as in the other layers of the mode.

        4 bits there, right before the softmax, would double the loss of a file of 4-bit activations.
        """
        return Activation(8) if self.mode == "a4" else None

    @property
    def kv(self) -> KvCodec:
        """The cache that the file is made for."""
        return KV_OF_BITS[self.options.kv_bits]

    @property
    def details(self) -> dict[str, object]:
        """Further entries of the provenance, as JSON: how the method read its options, its seeds."""
        return {}

    def memory_bytes(self, tokens: int) -> int:
        """Memory beyond what every method takes: a slab and, with `tokens` of text, four layers and the activations of one."""
        return 0

    def study(self, forward: TokenForward, on_layer: Callable[[int], None]) -> Study:
        """Statistics of the unquantized model: for every index `layer = forward.load(index)`, observe, `forward.unload(layer)`.

        `on_layer` is called with the index of each layer as it begins.  The arrays are small: the journal keeps them.
        """
        raise NotImplementedError

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        """The model to be quantized: the same names, and those of `extras` and of an untied head.

        Without what `install` adds, and without rounding, it is the same function as `source`.  Asked for rows in any order.
        """
        return source

    def install(self, index: int, module: nn.Module) -> None:
        """Add to a freshly loaded decoder layer what acts on inputs of its modules at run time (forward pre-hooks).

        Its weights are those of `tensors`, or what is stored of them: second blocks in their place, columns in the order of the
        matrix, the low-rank part added.
        """

    def prepare(self, block: Block) -> dict[str, Delivery]:
        """Quantize, or change for rounding, the layer of `block`, and advance `block.forward` to the inputs of the next.

        Returns deliveries by the name of the linear layer; the others are rounded from the module's weights as they are now.
        """
        raise NotImplementedError

    def deliver(self, item: LinearItem, read: RowReader) -> Delivery:
        """What is written for a linear layer that `prepare` did not deliver; `read`: the model or the prepared layer."""
        return Delivery(read)


def features_of(tower: Method, pictures: Sequence[PictureFile], tensors: Tensors, read: WholeReader | None) -> Sequence[Tensor]:
    """What a vision tower makes of pictures, float32 [1, tokens, width] each; `read`: where its weights come from, None: the
    checkpoint's, of a tower whose method changes none of them."""
    import torch

    from edgeq.converters.calibration.tower_forward import TowerForward

    assert isinstance(tower.stack, VisionConfig)
    forward = TowerForward(tower.family, tower.stack, pictures, tensors)
    with torch.no_grad():
        for index in range(forward.blocks):
            block = forward.load(index, read)
            tower.install(index, block)
            forward.advance(index, block)
            forward.unload(block)
    return forward.states
