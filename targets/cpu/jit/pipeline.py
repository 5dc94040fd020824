"""Numba as a compiler from Python functions to object files.  All names that are private to Numba are used in this file.

Numba by itself makes of every function a library that Python can call: with a wrapper for Python and one for C, optimized and
turned into machine code, whether it is a kernel or a part of one.  Here only kernels become machine code, once; and for any
processor that LLVM knows, because nothing is run.  The passes over Numba's own representation that do nothing for kernels
(closures, `with`, exceptions with arguments, array expressions) are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import compiler
from numba.core.codegen import CPUCodegen, CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.cpu import CPUContext, CPUTargetOptions
from numba.core.descriptors import TargetDescriptor
from numba.core.dispatcher import Dispatcher
from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_override, target_registry
from numba.core.typed_passes import (
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.typing.context import BaseContext
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    InlineInlinables,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)
from numba.extending import intrinsic, typeof_impl

from edgeq.targets.cpu.jit import processor
from edgeq.targets.cpu.jit.deferred import SYMBOL, DeferredFunction, ObjectFile, parts
from edgeq.targets.cpu.jit.numba_types import register_kinds

TARGET = "edgeq"
"""Name of the target in Numba, beside "cpu" and "cuda"."""


class _Library(CPUCodeLibrary):  # type: ignore[misc]
    """A module that is optimized and never run."""

    def _optimize_functions(self, ll_module: Any) -> None:
        """Numba does so before it links the parts of a library; what is done with the whole does it again."""
        ll_module.data_layout = self._codegen._data_layout

    def _finalize_specific(self) -> None:
        """No engine is told of it."""


class _Codegen(CPUCodegen):  # type: ignore[misc]
    """LLVM for a processor, which need not be this one."""

    _library_class = _Library

    def __init__(self, chosen: processor.Processor) -> None:
        self._processor = chosen
        super().__init__("edgeq")  # type: ignore[no-untyped-call]

    def _init(self, llvm_module: Any) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        triple, name, flags = self._processor.settings
        self._tm_features = flags
        self._tm = llvm.Target.from_triple(triple).create_target_machine(
            cpu=name, features=flags, opt=3, reloc="default" if self._processor.is_arm else "static",
            codemodel="jitdefault", jit=True,
        )  # fmt: skip
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self._processor.settings.triple
        return module

    def _add_module(self, module: Any) -> None:
        """Nothing is run."""


class _TypingContext(BaseContext):  # type: ignore[misc]
    """How types are inferred."""

    def load_additional_registries(self) -> None:
        """Numbers and the functions of `math`: with numpy's functions too, Numba would try them at every `+`."""
        from numba.core.typing import mathdecl

        self.install_registry(mathdecl.registry)


class _Context(CPUContext):  # type: ignore[misc]
    """How functions are lowered to LLVM's representation."""

    def __init__(self, typing_context: Any, chosen: processor.Processor) -> None:
        self.processor = chosen
        super().__init__(typing_context, TARGET)  # type: ignore[no-untyped-call]

    def init(self) -> None:
        self.is32bit = False
        self._internal_codegen = _Codegen(self.processor)  # type: ignore[assignment]

    def load_additional_registries(self) -> None:
        """Only a part of what Numba can lower: numbers, loops over ranges and the functions of `math`."""
        from numba.cpython import builtins, iterators, mathimpl, numbers, rangeobj, tupleobj  # noqa: F401

        self.install_registry(mathimpl.registry)

    def post_lowering(self, mod: Any, library: Any) -> None:
        """Kernels have no objects to count: Numba's runtime is not linked in."""

    def create_cfunc_wrapper(self, library: Any, fndesc: Any, env: Any, call_helper: Any) -> None:
        """A C function.  A kernel cannot raise: what Python would catch is a mistake in the kernel and ends the process."""
        module = self.create_module("wrapper")
        callee = ir.Function(module, self.call_conv.get_function_type(fndesc.restype, fndesc.argtypes), fndesc.llvm_func_name)
        arguments = [self.get_value_type(each) for each in fndesc.argtypes]
        wrapper = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), SYMBOL)
        b = ir.IRBuilder(wrapper.append_basic_block())
        status, _ = self.call_conv.call_function(b, callee, fndesc.restype, fndesc.argtypes, wrapper.args, attrs=("noinline",))
        with b.if_then(status.is_error, likely=False):
            b.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
        b.ret_void()
        library.add_ir_module(module)


class _Target(TargetDescriptor):  # type: ignore[misc]
    options = CPUTargetOptions

    def __init__(self) -> None:
        super().__init__(TARGET)

    @property
    def typing_context(self) -> Any:
        return _contexts()[0]

    @property
    def target_context(self) -> Any:
        return _contexts()[1]


@cache
def _contexts() -> tuple[Any, _Context]:
    typing_context = _TypingContext()  # type: ignore[no-untyped-call]
    return typing_context, _Context(typing_context, processor.current())


_target = _Target()


@register_pass(mutates_CFG=True, analysis_only=False)  # type: ignore[misc]
class _Lowering(NativeLowering):  # type: ignore[misc]
    """To LLVM's representation and no further."""

    _name = "edgeq_lowering"

    def run_pass(self, state: Any) -> bool:
        super().run_pass(state)
        lowered = state["cr"]
        # By this key callers find the function.
        state["cr"] = lowered._replace(cfunc=lowered.fndesc)
        state.targetctx.insert_user_function(lowered.fndesc, lowered.fndesc, [state.library])
        return True


class _Compiler(compiler.CompilerBase):  # type: ignore[misc]
    """Numba's passes as far as kernels need them."""

    def define_pipelines(self) -> list[PassManager]:
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.enable_pyobject = flags.enable_looplift = False
        return [self._passes()]

    def _passes(self) -> PassManager:
        passes = PassManager("edgeq")
        for each in (
            TranslateByteCode, FixupArgs, IRProcessing, RewriteSemanticConstants, DeadBranchPrune, GenericRewrites,
            InlineInlinables, ReconstructSSA, DeadBranchPrune,
            NopythonTypeInference, PreLowerStripPhis, _Lowering, NoPythonBackend,
        ):  # fmt: skip
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return passes


class _KernelCompiler(_Compiler):
    """The same, with a C function."""

    def define_pipelines(self) -> list[PassManager]:
        pipelines = super().define_pipelines()
        self.state.flags.no_cfunc_wrapper = False
        return pipelines


class _Inline(Dispatcher):  # type: ignore[misc]
    """A function that kernels call, compiled with the first of them.  Called by Python it is what it was."""

    targetdescr = _target

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres


_OPTIONS = {"nopython": True, "boundscheck": False, "error_model": "numpy"}


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    return lambda function: _Inline(function, targetoptions=options, pipeline_class=_Compiler)  # type: ignore[no-untyped-call]


class _Cpu(CPU):  # type: ignore[misc]
    """What Numba has for processors in general is valid here."""


target_registry[TARGET] = _Cpu
dispatcher_registry[_Cpu] = _Inline
# With this Numba compiles its own functions in Python, such as `min`.
jit_registry[_Cpu] = _jit


_MAKE: dict[str, Any] = {
    "inline": _jit(**_OPTIONS),
    "always_inline": _jit(nopython=True, inline="always"),
    "intrinsic": intrinsic(prefer_literal=False),  # type: ignore[no-untyped-call]
    "literal_intrinsic": intrinsic(prefer_literal=True),  # type: ignore[no-untyped-call]
}
_made: dict[DeferredFunction, Any] = {}


def settle() -> None:
    """Tell Numba of all parts and kinds of records that it does not know yet."""
    register_kinds()
    while parts:
        # Taken off the list last: an interrupt must not lose one.
        _made[parts[0]] = _MAKE[parts[0].make](parts[0].py_func)
        parts.pop(0)


@typeof_impl.register(DeferredFunction)
def _type_of_part(part: DeferredFunction, context: Any) -> Any:
    """What a kernel calls is Numba's own."""
    if part not in _made:
        # It was defined while the kernel was compiled.
        settle()
    typing_context = _contexts()[0]
    typing_context.refresh()
    return typing_context.resolve_value_type(_made[part])


def compiled(function: Callable[..., Any], arguments: int) -> ObjectFile:
    """`function` of that many int64 as an object file with the function SYMBOL."""
    library = _library(function, arguments)
    module, codegen = library._final_module, library.codegen
    values = (*module.functions, *module.global_variables)
    names = {value.name for value in values if value.is_declaration and not value.name.startswith("llvm.")}
    return ObjectFile(codegen._tm.emit_object(module), sorted(names))


def assembly(function: Callable[..., Any], arguments: int) -> str:
    return str(_library(function, arguments).get_asm_str())


@contextmanager
def _without_collection() -> Iterator[None]:
    """The garbage collector waits: it would look through all that Numba makes, and keeps, a dozen times for each kernel."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _library(function: Callable[..., Any], arguments: int) -> Any:
    flags = compiler.Flags()
    CPUTargetOptions.parse_as_flags(flags, dict(_OPTIONS))
    with global_compiler_lock, target_override(TARGET), _without_collection():
        # Two threads that made contexts at once would each have its own, and parts are known to one alone.
        typing_context, target_context = _contexts()
        settle()
        made = compiler.compile_extra(
            typing_context, target_context, function, (types.intp,) * arguments, types.void, flags, {},
            pipeline_class=_KernelCompiler,
        )  # fmt: skip
        made.library._ensure_finalized()
    return made.library
